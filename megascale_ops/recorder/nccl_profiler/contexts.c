/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One context for each communicator that NCCL has told us of.
 *
 * NCCL keeps a number instead of a pointer, so a call with the context of a communicator that is gone finds nothing.
 * Here alone memory is taken, when a communicator is made; it is kept for later ones and never given back, since a late
 * call may still be counting in it.
 */

#include <stdlib.h>
#include <string.h>

#include "plugin.h"

/* 1,024 communicators at a time: each rank of a large job has some twenty. */
enum { MOST_CONTEXTS = 1024, MAKING = 2 };

/* Sends and receives carry no number of NCCL's, so they are counted for each peer and direction. */
struct counters {
    uint32_t peers;
    struct counters *smaller; /* kept for late calls */
    uint32_t next[];
};

static struct context contexts[MOST_CONTEXTS];
static uint64_t opened;

static profiler_page *page(void) { return LOAD_ACQUIRE(&megascale_page); }

/* Versions 1 to 3 do not say how many ranks there are: sends to and receives from the first 4,096 have numbers. */
static void prepare_counters(struct context *context, int ranks) {
    struct counters *counters = LOAD_ACQUIRE(&context->counters);
    uint32_t peers = ranks > 0 ? (uint32_t)ranks : 4096;
    if (counters == NULL || counters->peers < peers) {
        struct counters *larger = calloc(1, sizeof *larger + 2 * (size_t)peers * sizeof larger->next[0]);
        if (larger == NULL) return; /* then context_next says 0 */
        larger->peers = peers;
        larger->smaller = counters;
        STORE_RELEASE(&context->counters, larger);
        return;
    }
    for (uint32_t at = 0; at < 2 * counters->peers; at++) STORE(&counters->next[at], 0);
}

static void keep_name(struct context *context, const char *name) {
    memset(context->name, 0, sizeof context->name);
    if (name != NULL) memcpy(context->name, name, strnlen(name, sizeof context->name - 1));
}

/* Write a communicator down, once, as soon as there is a box; the context remembers where, for its end. */
void context_write(struct context *context) {
    uint64_t unwritten = 0, id = LOAD(&context->id);
    if (id == 0 || LOAD(&context->record) || !box_is_open()) return;
    if (!__atomic_compare_exchange_n(&context->record, &unwritten, UINT64_MAX, false, __ATOMIC_ACQUIRE,
                                     __ATOMIC_RELAXED)) {
        return;
    }
    uint64_t number = COUNT(&page()->communicators_next);
    communicator_slot *slot = box_communicator(number);
    if (slot == NULL || slot_claim(&slot->sequence, number) != TAKEN) return;
    slot->id = id;
    slot->opened_mono_ns = mono_ns();
    slot->closed_mono_ns = 0;
    slot->nranks = (int32_t)LOAD(&context->ranks);
    slot->rank = (int32_t)LOAD(&context->rank);
    slot->nnodes = (int32_t)LOAD(&context->nodes);
    memcpy(slot->name, context->name, sizeof slot->name);
    slot_close(&slot->sequence);
    STORE_RELEASE(&context->record, number + 1);
}

/* Versions 1 to 3 give id 0: their first event tells (context_identify). 0 is returned when there are too many. */
handle_t context_open(const char *name, uint64_t id, int nodes, int ranks, int rank) {
    for (int tried = 0; tried < MOST_CONTEXTS; tried++) {
        uint64_t number = COUNT(&opened);
        struct context *context = &contexts[number % MOST_CONTEXTS];
        handle_t free = 0;
        if (!__atomic_compare_exchange_n(&context->handle, &free, MAKING, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
            continue;
        }
        STORE(&context->id, id);
        STORE(&context->record, 0);
        STORE(&context->ranks, ranks);
        STORE(&context->rank, rank);
        STORE(&context->nodes, nodes);
        STORE(&context->floor_since_ns, 0);
        STORE(&context->calls, 0);
        STORE(&context->mask, -1);
        STORE(&context->chained, NULL);
        keep_name(context, name);
        prepare_counters(context, ranks);
        context_write(context);
        handle_t handle = make_handle(HANDLE_CONTEXT, number);
        STORE_RELEASE(&context->handle, handle);
        COUNT(&page()->contexts_open);
        return handle;
    }
    COUNT(&page()->dropped_no_context);
    return 0;
}

struct context *context_of(handle_t handle) {
    if (handle_kind(handle) != HANDLE_CONTEXT) return NULL;
    struct context *context = &contexts[handle_number(handle) % MOST_CONTEXTS];
    return LOAD_ACQUIRE(&context->handle) == handle ? context : NULL;
}

/* Versions 1 to 3 say with every event whose it is; the first of a communicator is believed. */
void context_identify(struct context *context, const char *name, uint64_t id, int rank) {
    if (id == 0 || LOAD(&context->id)) return;
    uint64_t unwritten = 0;
    /* Whoever takes the record may write the name. */
    if (!__atomic_compare_exchange_n(&context->record, &unwritten, UINT64_MAX, false, __ATOMIC_ACQUIRE,
                                     __ATOMIC_RELAXED)) {
        return;
    }
    keep_name(context, name);
    STORE(&context->rank, rank);
    STORE(&context->id, id);
    STORE_RELEASE(&context->record, 0);
    context_write(context);
}

void context_close(handle_t handle) {
    struct context *context = context_of(handle);
    if (context == NULL) return;
    if (!__atomic_compare_exchange_n(&context->handle, &handle, MAKING, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
        return; /* somebody closes it already */
    }
    uint64_t record = LOAD_ACQUIRE(&context->record);
    communicator_slot *slot = record && record != UINT64_MAX ? box_communicator(record - 1) : NULL;
    if (slot != NULL && slot_reopen(&slot->sequence, record - 1) == TAKEN) {
        slot->closed_mono_ns = mono_ns();
        slot_close(&slot->sequence);
    }
    chain_finalize(context);
    STORE_RELEASE(&context->handle, 0);
    __atomic_fetch_sub(&page()->contexts_open, 1, __ATOMIC_RELAXED);
}

/* The number of this send to, or receive from, a peer: the same on both sides. */
uint64_t context_next(struct context *context, int32_t peer, bool sends) {
    struct counters *counters = LOAD_ACQUIRE(&context->counters);
    if (counters == NULL || peer < 0 || (uint32_t)peer >= counters->peers) return 0;
    return COUNT(&counters->next[2 * (uint32_t)peer + (sends ? 1 : 0)]);
}

/*
 * Bring a point in time of the GPU's clock to CLOCK_MONOTONIC.
 *
 * NCCL calls us after the GPU has stamped, by its polling: a few microseconds mostly, milliseconds under load, never
 * less than zero. So the smallest difference that was seen is the nearest to the truth. The clocks drift apart by tens
 * of microseconds a second, so only the last one to two seconds count; and nothing of them where the GPU's clock has
 * jumped: then they would put it long before it was enqueued, or after now. (NCCL tells of the enqueueing behind the launch
 * itself, where its thread may be held up for a while.)
 */
int64_t to_host_clock(struct context *context, uint64_t gpu_clock_ns, int64_t enqueued_ns, int64_t now_ns) {
    enum { WINDOW_NS = 1000000000, MOST_HELD_UP_NS = 1000000000 };
    int64_t behind = passed(gpu_clock_ns, (uint64_t)now_ns), floor = LOAD(&context->floor_ns);
    int64_t since = LOAD(&context->floor_since_ns);
    if (since == 0) {
        STORE(&context->floor_before_ns, behind);
        STORE(&context->floor_ns, floor = behind);
        STORE(&context->floor_since_ns, now_ns);
    } else if (now_ns - since > WINDOW_NS) {
        STORE(&context->floor_before_ns, now_ns - since > 2 * (int64_t)WINDOW_NS ? behind : floor);
        STORE(&context->floor_ns, floor = behind);
        STORE(&context->floor_since_ns, now_ns);
    } else if (behind < floor) {
        STORE(&context->floor_ns, floor = behind);
    }
    int64_t before = LOAD(&context->floor_before_ns);
    int64_t place = later((int64_t)gpu_clock_ns, before < floor ? before : floor);
    if (place <= now_ns && place >= enqueued_ns - MOST_HELD_UP_NS) return place;
    STORE(&context->floor_before_ns, behind);
    STORE(&context->floor_ns, behind);
    return now_ns;
}
