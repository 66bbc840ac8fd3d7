/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Collectives, sends and receives in the black box's ring: written when they are enqueued, again for every channel that
 * starts or ends on the GPU.
 *
 * The slot in the ring is all the state there is. The handle carries the record's number, so whatever comes for a record
 * that 2,048 newer ones have driven out is counted and forgotten.
 */

#include "plugin.h"

static profiler_page *page(void) { return LOAD_ACQUIRE(&megascale_page); }

static nccl_slot *reopen(uint64_t number) {
    nccl_slot *slot = box_nccl(number);
    if (slot == NULL) {
        COUNT(&page()->dropped_no_box);
        return NULL;
    }
    enum taking taking = slot_reopen(&slot->sequence, number);
    if (taking == TAKEN) return slot;
    COUNT(taking == BUSY ? &page()->dropped_busy : &page()->dropped_late);
    return NULL;
}

/* Every rank keeps the same ones, whatever its level: those of a coarser level are among those of a finer. */
static bool is_sampled(const struct operation *operation) {
    unsigned level = level_now();
    if (level <= LEVEL_NO_P2P || operation->is_kept) return true;
    return !operation->is_p2p && (operation->seq & ((UINT64_C(1) << (level - LEVEL_NO_P2P)) - 1)) == 0;
}

handle_t operation_start(struct context *context, const struct operation *operation) {
    if (operation->is_thinned) COUNT(&page()->untimed);
    if (!is_sampled(operation)) {
        COUNT(&page()->unsampled);
        return 0;
    }
    int64_t now = mono_ns();
    if (!box_open(now)) {
        COUNT(&page()->dropped_no_box);
        return 0;
    }
    if (LOAD(&context->record) == 0) context_write(context);
    uint64_t number = COUNT(&page()->nccl_next);
    nccl_slot *slot = box_nccl(number);
    if (slot == NULL) return 0; /* a child of the rank, which has just left the box */
    enum taking taking = slot_claim(&slot->sequence, number);
    if (taking != TAKEN) {
        COUNT(taking == BUSY ? &page()->dropped_busy : &page()->dropped_late);
        return 0;
    }
    bool by_copy = operation->flags & MEGASCALE_NCCL_FLAG_COPY_ENGINE;
    slot->seq = (int64_t)operation->seq;
    slot->bytes_moved = (int64_t)(operation->count * datatype_bytes(operation->datatype));
    slot->enqueued_mono_ns = now;
    slot->gpu_started_mono_ns = by_copy ? now : 0;
    slot->gpu_ended_mono_ns = 0;
    slot->gpu_clock_ns = 0;
    slot->communicator = LOAD(&context->id);
    slot->step = box_step();
    slot->started_channels = 0;
    STORE(&slot->ended_channels, 0);
    slot->function = operation->function;
    slot->datatype = operation->datatype;
    slot->algorithm = operation->algorithm;
    slot->protocol = operation->protocol;
    slot->channels = operation->channels;
    slot->peer = operation->peer;
    slot->root = operation->root;
    slot->flags = operation->flags;
    slot_close(&slot->sequence);
    /* Where channels are left out and NCCL was not told, they come all the same, and find nothing to belong to. */
    bool is_told = operation->is_thinned || !((int)LOAD(&page()->mask) & EVENT_KERNEL_CH);
    if (operation->flags & MEGASCALE_NCCL_FLAG_UNTIMED && !is_told) return 0;
    return make_handle(by_copy ? HANDLE_COPY : HANDLE_OPERATION, number);
}

/* Without the GPU's clock (version 3, or a zero) the callback's time stands for it, and the record says so. */
handle_t channel_start(struct context *context, handle_t parent, unsigned channel, uint64_t gpu_clock_ns, bool timed) {
    if (handle_kind(parent) != HANDLE_OPERATION || channel >= MOST_CHANNELS) return 0;
    uint64_t number = handle_number(parent);
    nccl_slot *slot = reopen(number);
    if (slot == NULL) return 0;
    bool is_first = slot->started_channels == 0;
    if (timed && gpu_clock_ns) {
        if (slot->gpu_clock_ns == 0) {
            slot->gpu_started_mono_ns = to_host_clock(context, gpu_clock_ns, slot->enqueued_mono_ns, mono_ns());
            slot->gpu_clock_ns = gpu_clock_ns;
        } else if (gpu_clock_ns < slot->gpu_clock_ns) {
            slot->gpu_started_mono_ns = later(slot->gpu_started_mono_ns, passed(slot->gpu_clock_ns, gpu_clock_ns));
            slot->gpu_clock_ns = gpu_clock_ns;
        }
    } else {
        timed = false;
        if (is_first) slot->gpu_started_mono_ns = mono_ns();
        slot->flags |= MEGASCALE_NCCL_FLAG_HOST_CLOCK;
    }
    uint64_t bit = UINT64_C(1) << channel;
    slot->started_channels |= bit;
    if (slot->ended_channels & bit) STORE(&slot->ended_channels, slot->ended_channels & ~bit); /* it runs again */
    slot->flags &= ~(MEGASCALE_NCCL_FLAG_DONE | MEGASCALE_NCCL_FLAG_UNTIMED);
    slot_close(&slot->sequence);
    return make_handle(HANDLE_CHANNEL, number) | channel << HANDLE_CHANNEL_SHIFT | (timed ? HANDLE_TIMED : 0);
}

/* With the GPU's clock, or with 0: then the host's. NCCL says both, the clock first; what comes second is passed over. */
void channel_end(handle_t handle, uint64_t gpu_clock_ns) {
    uint64_t number = handle_number(handle), bit = UINT64_C(1) << handle_channel(handle);
    nccl_slot *slot = box_nccl(number);
    if (slot != NULL && slot_holds(&slot->sequence, number) && LOAD(&slot->ended_channels) & bit) return;
    slot = reopen(number);
    if (slot == NULL) return;
    int64_t ended;
    if (gpu_clock_ns && handle & HANDLE_TIMED) {
        int64_t lasted = passed(slot->gpu_clock_ns, gpu_clock_ns);
        if (lasted < 0) slot->flags |= MEGASCALE_NCCL_FLAG_DOUBTFUL;
        ended = later(slot->gpu_started_mono_ns, lasted < 0 ? 0 : lasted);
    } else {
        ended = mono_ns();
        slot->flags |= MEGASCALE_NCCL_FLAG_HOST_CLOCK;
    }
    if (ended > slot->gpu_ended_mono_ns) slot->gpu_ended_mono_ns = ended;
    uint64_t all = slot->ended_channels | bit;
    STORE(&slot->ended_channels, all);
    bool is_exact = slot->flags & MEGASCALE_NCCL_FLAG_EXACT_CHANNELS;
    if (all == slot->started_channels && (!is_exact || (uint32_t)__builtin_popcountll(all) >= slot->channels)) {
        slot->flags |= MEGASCALE_NCCL_FLAG_DONE;
    }
    slot_close(&slot->sequence);
}

/* For kernels that is the end of the enqueueing, which says nothing; for copy engines it is the end that there is. */
void operation_stop(handle_t handle) {
    if (handle_kind(handle) != HANDLE_COPY) return;
    nccl_slot *slot = reopen(handle_number(handle));
    if (slot == NULL) return;
    if (slot->gpu_ended_mono_ns == 0) slot->gpu_ended_mono_ns = mono_ns();
    slot->flags |= MEGASCALE_NCCL_FLAG_DONE;
    slot_close(&slot->sequence);
}
