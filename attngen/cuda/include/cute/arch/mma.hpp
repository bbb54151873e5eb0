// Stands in for what CUTLASS's instruction wrappers share.
#pragma once

#include <cute/config.hpp>
