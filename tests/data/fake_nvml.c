/* A stand-in for libnvidia-ml.so.1 that lists GPUs and fails where the environment says so.

   FAKE_GPUS is the number of GPUs. FAKE_INIT, FAKE_COUNT, FAKE_HANDLE and FAKE_UUID are the codes of
   NVML's errors that the steps of these names return; without them the steps succeed. */
#include <stdlib.h>
#include <string.h>

static int number(const char *name) {
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}

int nvmlInit_v2(void) { return number("FAKE_INIT"); }
int nvmlInitWithFlags(unsigned flags) { return flags ? 2 : number("FAKE_INIT"); }
int nvmlShutdown(void) { return 0; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    strncpy(text, "570.86.15", size);
    return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 12080; /* CUDA 12.8 */
    return 0;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = number("FAKE_GPUS");
    return number("FAKE_COUNT");
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if ((int)index >= number("FAKE_GPUS"))
        return 2; /* an invalid argument */
    *handle = (void *)(long)(index + 1);
    return number("FAKE_HANDLE");
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    strncpy(text, "GPU-11111111-2222-3333-4444-555555555550", size);
    text[39] += (char)(long)handle;
    return number("FAKE_UUID");
}

int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
    strncpy(text, handle ? "Fake GPU" : "", size);
    return 0;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    *current = *pending = handle ? 0 : 1;
    return 0;
}
