/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which collectives have channels, where their cost to NCCL itself would be more than the budget.
 *
 * For a collective with channels NCCL hands its proxy thread one more task for each channel. That can't be measured from
 * a callback, so it is reckoned from what was measured once (benchmarks/results/nccl_profiler_h200.txt): within the
 * budget all have channels, beyond it one in N, N a power of two. Chosen is by a collective's number on its
 * communicator, scattered as by the golden ratio, so that no rhythm of the script's can miss them for ever; what one
 * rank keeps at a larger N all with a smaller N keep, too.
 *
 * It begins after half a minute of collectives. A script that sends and receives at all has begun with that by then, as a
 * rule in its first step, and where it has before anything was left out, nothing ever is (mask.c says why).
 */

#include "plugin.h"

/* Measured on 4 H200, NCCL 2.28: 0.5 and 2 MB +8 to +53 us, median of six 11; 32 and 256 MB at most +1.4 us. */
enum { SMALL_COSTS_NS = 15000, LARGE_COSTS_NS = 1400, LARGE_BYTES = 16 << 20 };
/* One in 1,024: of 100,000 operations a second, more than the host can give, a hundred. */
enum { MOST_SHIFT = 10 };
/* What passed between two looks counts as this at most: nobody looks while nothing is called. */
enum { MOST_A_LOOK_NS = 2000000000 };

static uint32_t shift, begun;
static uint64_t reckoned_ns, after_ns, seen_ns;

/* Nothing is left out until collectives were seen for so long. */
void thinning_set_after(uint64_t wanted_ns) { STORE(&after_ns, wanted_ns); }

/* Pure: thinner at once, as far as needed; half as thin when that would stay within three quarters of the budget. */
__attribute__((visibility("default"))) uint32_t megascale_profiler_thin(uint32_t now, uint64_t reckoned_ppm,
                                                                        uint64_t budget_ppm) {
    uint32_t needed = 0;
    while (needed < MOST_SHIFT && reckoned_ppm >> needed > budget_ppm) needed++;
    if (needed >= now) return needed;
    return (reckoned_ppm >> (now - 1)) * 4 <= budget_ppm * 3 ? now - 1 : now;
}

/* Pure: whether the collective of this number has channels where one in 2^at has. */
__attribute__((visibility("default"))) bool megascale_profiler_keeps(uint32_t at, uint64_t number) {
    return at == 0 || (number * UINT64_C(0x9E3779B97F4A7C15)) >> (64 - at) == 0;
}

bool thinning_has_begun(void) { return LOAD(&begun); }

bool thinning_keeps(uint64_t number) { return megascale_profiler_keeps(LOAD(&shift), number); }

/* Add what a collective with channels costs, whether it has them or not. */
void thinning_reckon(const struct context *context, const struct operation *operation) {
    uint64_t bytes = operation->count * datatype_bytes(operation->datatype);
    /* Of these two NCCL counts what one rank gives or gets. */
    bool is_part = operation->function == MEGASCALE_NCCL_FUNCTION_ALL_GATHER ||
                   operation->function == MEGASCALE_NCCL_FUNCTION_REDUCE_SCATTER;
    if (is_part && LOAD(&context->ranks) > 0) bytes *= (uint64_t)LOAD(&context->ranks);
    __atomic_fetch_add(&reckoned_ns, bytes < LARGE_BYTES ? SMALL_COSTS_NS : LARGE_COSTS_NS, __ATOMIC_RELAXED);
}

/*
 * Once a second: where callbacks alone are over the budget, too, channels are as few as can be. Say if fewer than now.
 * `turns`: the mask turns, so something can be left out.
 */
bool thinning_look(uint64_t passed_ns, uint64_t budget_ppm, uint32_t level, bool turns) {
    uint64_t reckoned = __atomic_exchange_n(&reckoned_ns, 0, __ATOMIC_RELAXED);
    if (is_held()) return false; /* what is measured now is no rule for what comes */
    uint32_t before = LOAD(&shift);
    uint32_t now = megascale_profiler_thin(before, reckoned * 1000 / (passed_ns / 1000 + 1), budget_ppm);
    if (level >= LEVEL_NO_CHANNELS) now = MOST_SHIFT;
    if (reckoned) seen_ns += passed_ns < MOST_A_LOOK_NS ? passed_ns : MOST_A_LOOK_NS;
    if (!turns || seen_ns < LOAD(&after_ns)) now = 0;
    STORE(&shift, now);
    if (now) STORE(&begun, 1);
    STORE(&LOAD_ACQUIRE(&megascale_page)->timed_one_in, UINT64_C(1) << now);
    return now > before;
}
