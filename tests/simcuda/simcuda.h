// The control interface of the simulated libcuda: a TEST DOUBLE of the driver API over host memory,
// for machines without a GPU. It enforces what we believe of the real driver, and none of its times
// are a GPU's.
//
// Settings, by name, for `simcuda_configure` and for the environment when the library is loaded:
//   devices      SIMCUDA_DEVICES      how many devices there are (1)
//   memory       SIMCUDA_MEMORY       bytes of each (4 GiB)
//   vmm          SIMCUDA_VMM          1 where they have virtual memory management (1)
//   granularity  SIMCUDA_GRANULARITY  bytes, minimum and recommended (2 MiB, as on real devices)
//   read_only    SIMCUDA_READ_ONLY    1 where cuMemSetAccess takes PROT_READ (1)
//   rdma         SIMCUDA_RDMA         1 where cuMemCreate takes the GPUDirect RDMA flag (1)
// SIMCUDA_REPORT_LEAKS=1 has the library say on stderr, when it is unloaded, what was not given
// back.
//
// Calls are named as documented ("cuMemGetInfo", without "_v2"). "*" is every call. All of it is
// safe to call from any thread.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Returns 0, or -1 where there is no such setting.
int simcuda_configure(const char* setting, uint64_t value);
// Gives everything back, whatever the rules, and starts anew with the settings of the environment.
void simcuda_reset(void);

// Lets `skip` calls of that name pass, answers the next `refuse` with `code`, then lets all pass
// again. Returns 0, or -1 where there is no such call.
int simcuda_fail(const char* call, uint64_t skip, uint64_t refuse, int code);
// Every later call of that name takes this much longer; `busy` burns the time instead of sleeping.
int simcuda_set_latency(const char* call, double microseconds, int busy);

typedef struct {
  uint64_t handles;   // allocations that were not released
  uint64_t mappings;  // cuMemMap without cuMemUnmap
  uint64_t ranges;    // cuMemAddressReserve without cuMemAddressFree
  uint64_t contexts;  // cuDevicePrimaryCtxRetain without release
} SimcudaLeaks;
SimcudaLeaks simcuda_leaks(void);
// Bytes of a device that no allocation takes.
uint64_t simcuda_free_memory(int device);

// What is mapped at an address: the handle, or 0; `access` gets its CUmemAccess_flags.
uint64_t simcuda_mapping_at(uint64_t address, int* access);

// How often a call was made since the library was loaded or reset.
uint64_t simcuda_calls(const char* call);
// The log: one line a call, "cuMemMap(ptr=0x..., size=2097152, offset=0, handle=7, flags=0) =
// CUDA_SUCCESS".
void simcuda_log(int on);  // off at first; turning it on empties it
size_t simcuda_log_lines(void);
// Copies a line with its ending zero into `line`; returns its length without it, as snprintf does.
size_t simcuda_log_line(size_t index, char* line, size_t size);

#ifdef __cplusplus
}
#endif
