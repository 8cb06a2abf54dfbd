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
//   pointers     SIMCUDA_POINTERS     addresses of which cuPointerGetAttribute gives a pointer
//                                     beside those mapped with access: 1 mapped without, 2
//                                     reserved, 3 both (1)
//   handle_types SIMCUDA_HANDLE_TYPES the shareable handle types that cuMemCreate takes, a mask (1:
//                                     POSIX descriptors, 8: fabric handles)
//   imex         SIMCUDA_IMEX         0 where fabric handles are not permitted all the same (1)
//   first_uuid   SIMCUDA_FIRST_UUID   the number in the first device's UUID: another one stands for
//                                     other devices (1)
//   eager        SIMCUDA_EAGER        1 where work that may run does so when it is launched, 0
//                                     when it is asked about, harder on the driver (1)
//   sync_timeout SIMCUDA_SYNC_TIMEOUT milliseconds after which synchronising with work that is held
//                                     back answers CUDA_ERROR_LAUNCH_TIMEOUT (10,000)
//   blocking     SIMCUDA_BLOCKING     1 where cuMemUnmap and cuMemSetAccess return only once the
//                                     device is idle, as cuda.h allows, and within
//                                     sync_timeout (0)
// SIMCUDA_REPORT_LEAKS=1 has the library say on stderr, when it is unloaded, what was not given
// back.
//
// Calls are named as documented ("cuMemGetInfo", without "_v2"). "*" is every call. All of it is
// safe to call from any thread.
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {

// Returns 0, or -1 where there is no such setting.
int simcuda_configure(const char* setting, uint64_t value);
// Gives everything back, whatever the rules, and starts anew with the settings of the environment.
void simcuda_reset(void);

// Lets `skip` calls of that name pass, answers the next `refuse` with `code`, then lets all pass
// again. Returns 0, or -1 where there is no such call.
int simcuda_fail(const char* call, uint64_t skip, uint64_t refuse, int code);
// Forgets the failures asked for and returns how many refusals were still to come.
uint64_t simcuda_disarm(void);
// Every later call of that name takes this much longer.
int simcuda_set_latency(const char* call, double microseconds);
// Calls of that name wait, once they are counted, until the name is held no longer: hold = 0.
int simcuda_hold_calls(const char* call, int hold);

typedef struct {
  uint64_t handles;   // allocations that were not released
  uint64_t mappings;  // cuMemMap without cuMemUnmap
  uint64_t ranges;    // cuMemAddressReserve without cuMemAddressFree
  uint64_t contexts;  // cuDevicePrimaryCtxRetain without release
  uint64_t streams;   // cuStreamCreate without cuStreamDestroy
  uint64_t events;    // cuEventCreate without cuEventDestroy
  uint64_t objects;   // cuUserObjectCreate, and references left
} SimcudaLeaks;
SimcudaLeaks simcuda_leaks(void);
// Of what there is how many, until the thread asks again; empty where there is nothing.
const char* simcuda_describe(const SimcudaLeaks* left);
// Another takes so many bytes of a device, as PyTorch does for the results of its operations, or
// gives them back, below 0. Returns a CUresult.
int simcuda_take_memory(int device, int64_t bytes);
// Bytes of a device that no allocation takes.
uint64_t simcuda_free_memory(int device);

// What is mapped at an address: the handle, or 0; `access` gets its CUmemAccess_flags.
uint64_t simcuda_mapping_at(uint64_t address, int* access);

// How often a call was made since the library was loaded or reset.
uint64_t simcuda_calls(const char* call);
// How many calls were refused since then.
uint64_t simcuda_refusals(void);

// Streams are CUstream values, and 0 the default stream of the thread's context, or else of the
// first device. What returns an int returns 0, or -1 where there is no such stream.
#define SIMCUDA_ALL_STREAMS UINT64_MAX

// A held stream executes nothing until it is released: its kernels "run", its events do not pass.
// SIMCUDA_ALL_STREAMS holds those made later too.
int simcuda_hold(uint64_t stream);
int simcuda_release(uint64_t stream);
// Has a held stream execute one item: a launch, a wait or an event.
int simcuda_step(uint64_t stream);
// Events recorded from now on pass only after so many cuEventQuery, and so much time, too late:
// UINT64_MAX queries is never. (0, 0) ends that, for those that were recorded as well.
void simcuda_late_events(uint64_t queries, double milliseconds);

// Events recorded from now on answer CUDA_ERROR_NOT_READY to their first so many cuEventQuery,
// passed or not. They hold no later work back, so that CPU tensors may go on standing for the
// device's.
void simcuda_unseen_events(uint64_t queries);

// Launches a kernel that reads [address, address + size), or stores the byte `writes` there where
// that is not 0. What it finds when it is executed counts: memory that is not accessible, or is not
// what was mapped at the launch, is an illegal access, and later calls in that context answer that.
// Returns a CUresult. In a stream that is being captured it becomes part of the graph.
int simcuda_launch(uint64_t stream, uint64_t address, uint64_t size, int writes);

// Keeps a stream busy for so long from now on, as a kernel does that touches none of the memory
// here.
int simcuda_occupy(uint64_t stream, double milliseconds);

// A CUcontext of a device beside its primary one, as a green context's is: streams and events that
// are made while it is current are its own.
uint64_t simcuda_make_context(int device);
// A stream for tests that make no driver calls of their own, in the current context.
uint64_t simcuda_make_stream(int blocking);
int simcuda_destroy_stream(uint64_t stream);
// Items that a stream has not executed yet.
uint64_t simcuda_pending(uint64_t stream);
// Executes what may be executed.
void simcuda_run(void);
// Illegal accesses, and mappings that were removed or changed under work that has not run yet.
uint64_t simcuda_illegal_accesses(void);
}
