/* Two pretended GPUs that do not reach each other, behind the driver's calls that `distmlp doctor` makes. */
#include <stddef.h>

int cuInit(unsigned flags) { return flags ? 1 : 0; }
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return ordinal < 0 || ordinal > 1; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)device << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 8 : attribute == 76 ? device - 40 : -1;
  return 0;
}
int cuDeviceCanAccessPeer(int *answer, int device, int peer) { *answer = 0; return device == peer; }
