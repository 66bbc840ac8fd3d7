/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What may be recorded for how much time: the plugin measures itself and steps down when it costs more than its budget.
 *
 * Measured are the callbacks, on whatever thread, one in sixteen; what NCCL itself does more for an event is not seen,
 * but reckoned (thinning.c). The first step down leaves out the kernels' channels, which are nine in ten of all calls
 * (where the mask turns: all but one in 1,024); the second sends and receives; each further one keeps half as many
 * collectives, the same on all ranks.
 */

#include "plugin.h"

/* 8 calm seconds, then twice as many after every failure, up to 512: who is near the limit must not go up and down. */
enum { FIRST_WAIT = 8, LONGEST_WAIT = 512, LOOK_EVERY_NS = 1000000000, SAMPLED_ONE_IN_BITS = 4 };
/* 5 us, fifty times what a call takes: beyond that the thread was not running, which is no cost of ours. */
enum { MOST_A_CALL_NS = 5000 };

static struct ladder ladder = {.wait = FIRST_WAIT};
static uint32_t gaps;
static int looking;
static int64_t looked_ns;
static uint64_t own_ns_before;

/* Pure: step down when over the budget, up after calm looks well within it. */
__attribute__((visibility("default"))) void megascale_profiler_decide(struct ladder *at, uint64_t share_ppm,
                                                                      uint64_t budget_ppm) {
    if (share_ppm > budget_ppm) {
        at->calm = 0;
        if (at->level < LEVEL_MOST) at->level++;
        at->wait = at->wait * 2 < LONGEST_WAIT ? at->wait * 2 : LONGEST_WAIT;
        return;
    }
    if (share_ppm * 2 > budget_ppm) {
        at->calm = 0;
        return;
    }
    at->calm++;
    if (at->level > 0 && at->calm >= at->wait) {
        at->level--;
        at->calm = 0;
    } else if (at->level == 0 && at->calm >= LONGEST_WAIT) {
        at->wait = FIRST_WAIT;
        at->calm = 0;
    }
}

/* Since sends and receives were once left out, ours are not counted as the peers count theirs. */
bool p2p_has_gaps(void) { return LOAD(&gaps); }

static void look(int64_t now_ns) {
    int64_t before_ns = LOAD(&looked_ns);
    if (now_ns - before_ns < LOOK_EVERY_NS || __atomic_exchange_n(&looking, 1, __ATOMIC_ACQUIRE)) return;
    if (LOAD(&looked_ns) == before_ns) {
        profiler_page *page = LOAD_ACQUIRE(&megascale_page);
        uint64_t own_ns = LOAD(&page->own_ns);
        /* The box's page begins at zero when it takes over from ours: then there is nothing to compare with. */
        if (before_ns && own_ns >= own_ns_before) {
            uint64_t share_ppm = (own_ns - own_ns_before) * 1000 / ((uint64_t)(now_ns - before_ns) / 1000);
            uint64_t budget_ppm = LOAD(&page->budget_ppm);
            /* With fewer channels come fewer calls, too: one step at a time. */
            if (!thinning_look((uint64_t)(now_ns - before_ns), budget_ppm, ladder.level, mask_turns())) {
                megascale_profiler_decide(&ladder, share_ppm, budget_ppm);
            }
            STORE(&page->share_ppm, share_ppm);
        }
        own_ns_before = own_ns;
        level_set(ladder.level);
        if (ladder.level >= LEVEL_NO_P2P) STORE(&gaps, 1);
        STORE(&page->judged_mono_ns, now_ns);
        STORE(&looked_ns, now_ns);
        mask_refresh();
    }
    __atomic_store_n(&looking, 0, __ATOMIC_RELEASE);
}

/* Which calls are measured follows no pattern that the calls could have (the golden ratio scatters the count). */
int64_t watch_begin(void) {
    uint64_t count = COUNT(&LOAD_ACQUIRE(&megascale_page)->events);
    return (count * UINT64_C(0x9E3779B97F4A7C15)) >> (64 - SAMPLED_ONE_IN_BITS) == 0 ? mono_ns() : 0;
}

void watch_end(int64_t begun_ns) {
    if (begun_ns == 0) return;
    int64_t now_ns = mono_ns(), lasted_ns = now_ns - begun_ns;
    if (lasted_ns > MOST_A_CALL_NS) lasted_ns = MOST_A_CALL_NS;
    __atomic_fetch_add(&LOAD_ACQUIRE(&megascale_page)->own_ns, (uint64_t)lasted_ns << SAMPLED_ONE_IN_BITS,
                       __ATOMIC_RELAXED);
    look(now_ns);
}
