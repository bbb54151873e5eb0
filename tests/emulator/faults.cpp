// Accesses to memory that nobody may touch.
#include <cstring>

#include "machine.hpp"

namespace emulator {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS};
struct sigaction outer[2];  // whose turn it is where no kernel is running

void name_fault(int signal, siginfo_t* info, void*) {
  if (cta != nullptr) fail("an access at %p, outside of every operand", info->si_addr);
  for (int i = 0; i < 2; ++i) {
    if (kSignals[i] == signal) sigaction(signal, &outer[i], nullptr);  // it is raised again
  }
}

}  // namespace

Faults::Faults() {
  struct sigaction ours;
  std::memset(&ours, 0, sizeof(ours));
  ours.sa_sigaction = name_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;  // a launch that fails does not return from it
  for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &ours, &outer[i]);
}
Faults::~Faults() {
  for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &outer[i], nullptr);
}

}  // namespace emulator
