/* A libnvidia-ml.so.1 that tells what a script says. The script, a file named by FAKE_NVML_SCRIPT, is read at
 * every call, so that a test can change the machine while it runs. One statement a line:
 *
 *   init CODE | driver TEXT | cuda NUMBER        the system
 *   epoch NUMBER                                 handles of another epoch are lost (a GPU that was reset)
 *   gpu UUID NAME TOTAL FREE                     a device; "_" in NAME is a space
 *   mig UUID NAME TOTAL FREE                     an instance of the last gpu
 *   slots NUMBER                                 instances that the last gpu could have (default: those it has)
 *   ecc 0|1                                      of the last gpu; without it, not supported
 *   process PID BYTES                            on the last device; BYTES "?" where it is not available
 *   memory CODE | processes CODE                 that question to the last device fails
 *
 * -DSECOND_VERSION, -DNO_PROCESSES and -DTOO_OLD leave out functions that older and older drivers lack.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, LOST = 15 };
enum { MOST = 64 };

typedef struct {
    unsigned long long total, free, used;
} Memory;

typedef struct {
    unsigned int pid;
    unsigned long long used;
    unsigned int gpu_instance, compute_instance;
} Process;

typedef struct {
    char uuid[96], name[96];
    unsigned long long total, free;
    int is_mig, parent, slots, ecc, memory_error, processes_error, process_count;
    Process processes[MOST];
} Device;

static struct {
    int init_error, cuda, count;
    uintptr_t epoch;
    char driver[80];
    Device devices[MOST];
} machine;

static Device *add(int is_mig, int parent, const char *line) {
    Device *device = &machine.devices[machine.count++];
    memset(device, 0, sizeof *device);
    sscanf(line, "%*s %95s %95s %llu %llu", device->uuid, device->name, &device->total, &device->free);
    for (char *at = device->name; *at; at++)
        if (*at == '_') *at = ' ';
    device->is_mig = is_mig;
    device->parent = parent;
    device->ecc = -1;
    return device;
}

static void read_script(void) {
    memset(&machine, 0, sizeof machine);
    FILE *file = fopen(getenv("FAKE_NVML_SCRIPT"), "r");
    if (!file) abort();
    char line[512], word[32], value[96];
    int gpu = -1;
    Device *last = NULL;
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%31s %95s", word, value) < 2) continue;
        if (!strcmp(word, "init")) machine.init_error = atoi(value);
        else if (!strcmp(word, "driver")) strncpy(machine.driver, value, 79);
        else if (!strcmp(word, "cuda")) machine.cuda = atoi(value);
        else if (!strcmp(word, "epoch")) machine.epoch = atoi(value);
        else if (!strcmp(word, "gpu")) { gpu = machine.count; last = add(0, -1, line); }
        else if (!strcmp(word, "mig")) { last = add(1, gpu, line); machine.devices[gpu].slots++; }
        else if (!strcmp(word, "slots")) machine.devices[gpu].slots = atoi(value);
        else if (!strcmp(word, "ecc")) machine.devices[gpu].ecc = atoi(value);
        else if (!strcmp(word, "memory")) last->memory_error = atoi(value);
        else if (!strcmp(word, "processes")) last->processes_error = atoi(value);
        else if (!strcmp(word, "process")) {
            Process *process = &last->processes[last->process_count++];
            char used[32];
            sscanf(line, "%*s %u %31s", &process->pid, used);
            process->used = *used == '?' ? ~0ULL : strtoull(used, NULL, 10);
        } else abort();
    }
    fclose(file);
}

static void *handle_of(int index) { return (void *)((machine.epoch << 16) | (uintptr_t)(index + 1)); }

static int find(void *handle, Device **device) {
    read_script();
    uintptr_t value = (uintptr_t)handle, index = (value & 0xffff) - 1;
    if (value >> 16 != machine.epoch) return LOST;
    if (index >= (uintptr_t)machine.count) return LOST;
    *device = &machine.devices[index];
    return SUCCESS;
}

static int text(const char *from, char *to, unsigned int length) {
    snprintf(to, length, "%s", from);
    return SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : "error of the fake"; }

int nvmlSystemGetDriverVersion(char *to, unsigned int length) {
    read_script();
    return text(machine.driver, to, length);
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    read_script();
    *version = machine.cuda;
    return machine.cuda ? SUCCESS : NOT_SUPPORTED;
}

#ifndef TOO_OLD
int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    read_script();
    return machine.init_error;
}
#endif

int nvmlDeviceGetCount_v2(unsigned int *count) {
    read_script();
    *count = 0;
    for (int i = 0; i < machine.count; i++) *count += !machine.devices[i].is_mig;
    return SUCCESS;
}

static int nth(int parent, unsigned int wanted, void **handle) {
    for (int i = 0; i < machine.count; i++)
        if (machine.devices[i].parent == parent && wanted-- == 0) {
            *handle = handle_of(i);
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle) {
    read_script();
    return nth(-1, index, handle);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    read_script();
    for (int i = 0; i < machine.count; i++)
        if (!strcmp(machine.devices[i].uuid, uuid)) {
            *handle = handle_of(i);
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(void *handle, char *to, unsigned int length) {
    Device *device;
    int error = find(handle, &device);
    return error ? error : text(device->uuid, to, length);
}

int nvmlDeviceGetName(void *handle, char *to, unsigned int length) {
    Device *device;
    int error = find(handle, &device);
    return error ? error : text(device->name, to, length);
}

int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    Device *device;
    int error = find(handle, &device);
    if (error) return error;
    if (device->memory_error) return device->memory_error;
    *memory = (Memory){device->total, device->free, device->total - device->free};
    return SUCCESS;
}

#ifdef SECOND_VERSION
#define nvmlDeviceGetComputeRunningProcesses_v3 nvmlDeviceGetComputeRunningProcesses_v2
#endif
#ifndef NO_PROCESSES
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned int *count, Process *processes) {
    Device *device;
    int error = find(handle, &device);
    if (error) return error;
    if (device->processes_error) return device->processes_error;
    unsigned int room = *count;
    *count = device->process_count;
    if (room < *count) return TOO_SMALL;
    memcpy(processes, device->processes, *count * sizeof *processes);
    return SUCCESS;
}
#endif

int nvmlDeviceGetMigMode(void *handle, unsigned int *current, unsigned int *pending) {
    Device *device;
    int error = find(handle, &device);
    if (error) return error;
    *current = *pending = device->slots > 0;
    return device->is_mig ? INVALID : SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned int *count) {
    Device *device;
    int error = find(handle, &device);
    if (!error) *count = device->slots;
    return error;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned int index, void **instance) {
    Device *device;
    int error = find(handle, &device);
    return error ? error : nth((int)(device - machine.devices), index, instance);
}

int nvmlDeviceGetEccMode(void *handle, unsigned int *current, unsigned int *pending) {
    Device *device;
    int error = find(handle, &device);
    if (error) return error;
    if (device->ecc < 0) return NOT_SUPPORTED;
    *current = *pending = device->ecc;
    return SUCCESS;
}
