#define PM_LEVEL 0
#define PM_TABLE kPortableKernels
#include "level.h"
