/* Stands in for libcuda.so.1: writes down what it is asked, keeps a list of what is registered, and fails on demand.
   Several threads may call it. */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define MAX 256
static char log_text[1 << 16];
static void *registered[MAX];
static char failing[64];
static int failure, devices = 2;
static atomic_int depth;
static atomic_flag taken = ATOMIC_FLAG_INIT;

static void lock(void) { while (atomic_flag_test_and_set(&taken)) ; }
static void unlock(void) { atomic_flag_clear(&taken); }

static int say(const char *name) {
    lock();
    size_t used = strlen(log_text);
    if (used + 64 < sizeof log_text) snprintf(log_text + used, 64, "%s\n", name);
    unlock();
    return strcmp(name, failing) ? 0 : failure;
}

static int add(void *address) {
    for (int i = 0; i < MAX; i++) if (registered[i] == address) return 712;
    for (int i = 0; i < MAX; i++) if (!registered[i]) { registered[i] = address; return 0; }
    return 2;
}

static int take_away(void *address) {
    for (int i = 0; i < MAX; i++) if (registered[i] == address) { registered[i] = 0; return 0; }
    return 713;
}

const char *fake_log(void) { return log_text; }
void fake_forget(void) { log_text[0] = 0; }
void fake_devices(int count) { devices = count; }
void fake_fail(const char *name, int code) { snprintf(failing, sizeof failing, "%s", name); failure = code; }
int fake_registered(void) { int n = 0; for (int i = 0; i < MAX; i++) n += registered[i] != 0; return n; }
int fake_depth(void) { return depth; }

int cuInit(unsigned flags) { (void)flags; return say("cuInit"); }
int cuDeviceGetCount(int *count) { *count = devices; return say("cuDeviceGetCount"); }
int cuDeviceGet(int *device, int ordinal) { *device = 10 + ordinal; return say("cuDeviceGet"); }
int cuDeviceGetPCIBusId(char *text, int room, int device) {
    snprintf(text, room, "0000:3B:00.%d", device - 10);
    return say("cuDeviceGetPCIBusId");
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(long)device;
    return say(device == 11 ? "retain 11" : "retain 10");
}
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return say("release"); }
int cuCtxPushCurrent_v2(void *context) { (void)context; depth++; return 0; }
int cuCtxPopCurrent_v2(void **context) { (void)context; depth--; return 0; }
int cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    int code = say("register");
    if (code) return code;
    if (depth < 1 || flags != 1 || (unsigned long)address % 4096 || bytes % 4096) return 1;
    /* A driver pins the pages, so that they must be there. */
    for (size_t at = 0; at < bytes; at += 4096) ((volatile char *)address)[at] = ((volatile char *)address)[at];
    lock();
    code = add(address);
    unlock();
    return code;
}
int cuMemHostUnregister(void *address) {
    int code = say("unregister");
    if (code) return code;
    lock();
    code = take_away(address);
    unlock();
    return code;
}
int cuGetErrorName(int code, const char **text) { *text = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR"; return 0; }
