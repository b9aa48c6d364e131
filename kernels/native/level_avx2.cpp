#define PM_LEVEL 1
#define PM_TABLE kAvx2Kernels
#include "level.h"
