"""Functions of scores and masks in calls, from torch: traced, recalled, given to kernels."""
