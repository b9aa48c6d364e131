#define PM_LEVEL 3
#define PM_TABLE kAmxKernels
#include "level.h"
