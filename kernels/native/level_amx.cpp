#define PM_LEVEL 4
#define PM_TABLE kAmxKernels
#include "level.h"
