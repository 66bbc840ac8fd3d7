/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the plugin know of each other.
 *
 * NCCL calls from threads of the script and from threads of its own, sometimes late, sometimes in an order that it never
 * promised. So there are no locks, no allocations and no pointers in what NCCL keeps for us: a handle is a number that
 * says which record it belongs to, and a record that is gone is told by its number.
 */
#ifndef MEGASCALE_NCCL_PLUGIN_H
#define MEGASCALE_NCCL_PLUGIN_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "../../blackbox/blackbox.h"
#include "abi.h"

/* The builtins work on the plain words of the black box's structs, which C11's atomic types would not. */
#define LOAD(place) __atomic_load_n((place), __ATOMIC_RELAXED)
#define STORE(place, value) __atomic_store_n((place), (value), __ATOMIC_RELAXED)
#define COUNT(place) __atomic_fetch_add((place), 1, __ATOMIC_RELAXED)
#define LOAD_ACQUIRE(place) __atomic_load_n((place), __ATOMIC_ACQUIRE)
#define STORE_RELEASE(place, value) __atomic_store_n((place), (value), __ATOMIC_RELEASE)

typedef struct megascale_box_profiler profiler_page;
typedef struct megascale_box_nccl nccl_slot;
typedef struct megascale_box_communicators communicator_slot;

static inline int64_t mono_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Clocks that are damaged, or jump: sums of theirs wrap, where those of signed numbers would be anything. */
static inline int64_t later(int64_t at_ns, int64_t by_ns) { return (int64_t)((uint64_t)at_ns + (uint64_t)by_ns); }
static inline int64_t passed(uint64_t since_ns, uint64_t until_ns) { return (int64_t)(until_ns - since_ns); }

/* A handle: the lowest bit set, as no pointer has it; then what it stands for; a channel; and a number. */
typedef uint64_t handle_t;
enum handle_kind { HANDLE_NONE, HANDLE_OPERATION, HANDLE_CHANNEL, HANDLE_COPY, HANDLE_PAIR, HANDLE_CONTEXT,
                   HANDLE_GROUP, HANDLE_CALL };
enum { HANDLE_TIMED = 1 << 4, HANDLE_CHANNEL_SHIFT = 5, HANDLE_NUMBER_SHIFT = 16, MOST_CHANNELS = 64 };

static inline handle_t make_handle(enum handle_kind kind, uint64_t number) {
    return number << HANDLE_NUMBER_SHIFT | (unsigned)kind << 1 | 1;
}
static inline enum handle_kind handle_kind(handle_t handle) {
    return handle & 1 ? (enum handle_kind)(handle >> 1 & 7) : HANDLE_NONE;
}
static inline uint64_t handle_number(handle_t handle) { return handle >> HANDLE_NUMBER_SHIFT; }
static inline unsigned handle_channel(handle_t handle) { return handle >> HANDLE_CHANNEL_SHIFT & (MOST_CHANNELS - 1); }

/* box.c: the rank's black box, mapped when it is there; and slots, which one thread at a time may write. */
extern profiler_page *megascale_page; /* never NULL: a page of the process's own until the box is there */
bool box_open(int64_t now_ns);
bool box_is_open(void);
bool box_given_up(void);
nccl_slot *box_nccl(uint64_t number);
communicator_slot *box_communicator(uint64_t number);
int64_t box_step(void);
void box_complain(const char *sentence, const char *detail);
enum taking { TAKEN, BUSY, GONE };
enum taking slot_claim(uint64_t *sequence, uint64_t number);
enum taking slot_reopen(uint64_t *sequence, uint64_t number);
void slot_close(uint64_t *sequence);
bool slot_holds(const uint64_t *sequence, uint64_t number);

/* words.c: NCCL's words as the box's codes. */
uint32_t function_code(const char *word);
uint32_t datatype_code(const char *word);
uint32_t algorithm_code(const char *word);
uint32_t protocol_code(const char *word);
uint64_t datatype_bytes(uint32_t code);

/* contexts.c: one for each communicator. */
struct context {
    handle_t handle; /* 0: free; 2: being made or given back */
    uint64_t id;
    uint64_t record; /* number in the ring of communicators, plus one; 0 before it stands there */
    int64_t ranks, rank, nodes;
    char name[sizeof((communicator_slot *)0)->name];
    int64_t floor_ns, floor_before_ns, floor_since_ns; /* the GPU's clock behind the host's; see to_host_clock */
    struct counters *counters;
    uint64_t calls; /* of collectives: the number of the next one, the same on all ranks */
    int mask;       /* the number of its NCCL's mask, or -1 */
    const struct plugin *chained; /* the second plugin, its context, and its mask */
    void *theirs;
    int *their_mask;
};
handle_t context_open(const char *name, uint64_t id, int nodes, int ranks, int rank);
struct context *context_of(handle_t handle);
void context_write(struct context *context);
void context_identify(struct context *context, const char *name, uint64_t id, int rank);
void context_close(handle_t handle);
uint64_t context_next(struct context *context, int32_t peer, bool sends);
int64_t to_host_clock(struct context *context, uint64_t gpu_clock_ns, int64_t enqueued_ns, int64_t now_ns);

/* operations.c: collectives, sends and receives, and the channels that their kernels run on. */
struct operation {
    uint64_t seq;
    uint64_t count;
    uint32_t function, datatype, algorithm, protocol, channels;
    int32_t peer, root;
    uint32_t flags;
    bool is_p2p;
    bool is_kept, is_thinned; /* its channels were asked for while the mask turns, or left out */
};
handle_t operation_start(struct context *context, const struct operation *operation);
handle_t channel_start(struct context *context, handle_t parent, unsigned channel, uint64_t gpu_clock_ns, bool timed);
void channel_end(handle_t handle, uint64_t gpu_clock_ns);
void operation_stop(handle_t handle);

/* hold.c: the level of the ladder that holds now. */
enum { LEVEL_NO_CHANNELS = 1, LEVEL_NO_P2P = 2, LEVEL_MOST = 12 };
int megascale_profiler_wanted(int base, uint32_t level);
void level_set(unsigned level);
void level_hold(int level);
bool is_held(void);
unsigned level_now(void);

/* budget.c: what may be recorded for how much time. */
struct ladder {
    uint32_t level; /* 0: everything */
    uint32_t calm;  /* looks in a row that were well within the budget */
    uint32_t wait;  /* calm looks before a step back is tried */
};
void megascale_profiler_decide(struct ladder *ladder, uint64_t share_ppm, uint64_t budget_ppm);
bool p2p_has_gaps(void);
int64_t watch_begin(void);
void watch_end(int64_t begun_ns);

/* thinning.c: which collectives have channels. */
uint32_t megascale_profiler_thin(uint32_t shift, uint64_t reckoned_ppm, uint64_t budget_ppm);
bool megascale_profiler_keeps(uint32_t shift, uint64_t number);
void thinning_set_after(uint64_t seen_ns);
bool thinning_has_begun(void);
bool thinning_keeps(uint64_t number);
void thinning_reckon(const struct context *context, const struct operation *operation);
bool thinning_look(uint64_t passed_ns, uint64_t budget_ppm, uint32_t level, bool turns);

/* mask.c: what NCCL is asked for. */
enum mask_mode { MASK_FIXED, MASK_THINS, MASK_ADAPTS };
void mask_set_mode(enum mask_mode mode);
bool mask_adapts(void);
bool mask_turns(void);
int mask_add(int *mask, int base, int abi, int **theirs);
void mask_refresh(void);
handle_t group_begin(const struct context *context, int depth);
void group_end(handle_t handle);
handle_t collective_call(struct context *context, bool is_captured);
handle_t p2p_call(const struct context *context, handle_t in_group, bool sends);

/* chain.c: a second plugin behind ours. */
void chain_init(struct context *context, int abi, int *mask, const char *name, uint64_t id, int nodes, int ranks,
                int rank, log_function say);
handle_t chain_start(struct context *context, int abi, uint64_t kind, void *event, handle_t ours);
handle_t chain_ours(handle_t handle);
void chain_stop(handle_t handle);
void chain_record(handle_t handle, int state, void *arguments);
void chain_finalize(struct context *context);

#endif
