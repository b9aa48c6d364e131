#define PM_LEVEL 2
#define PM_TABLE kAvx512Kernels
#include "level.h"
