#define PM_LEVEL 3
#define PM_TABLE kAvx512Bf16Kernels
#include "level.h"
