/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What may be recorded for how much time: the plugin measures itself and steps down when it costs more than its budget.
 *
 * Measured are the callbacks, on whatever thread, one in sixteen; what NCCL itself does more for an event is not seen.
 * The first step down leaves out the kernels' channels, which are nine in ten of all calls; the second sends and
 * receives; each further one keeps half as many collectives, the same on all ranks.
 *
 * NCCL may be asked for less in the midst of a run, or be asked for all and its calls answered with nothing. The first
 * saves more; the second changes nothing in how NCCL runs, so it is what happens unless MEGASCALE_PROFILER_MASK=adapt.
 */

#include "plugin.h"

/* 8 calm seconds, then twice as many after every failure, up to 512: who is near the limit must not go up and down. */
enum { FIRST_WAIT = 8, LONGEST_WAIT = 512, LOOK_EVERY_NS = 1000000000, SAMPLED_ONE_IN_BITS = 4, MOST_MASKS = 8 };
/* 5 us, fifty times what a call takes: beyond that the thread was not running, which is no cost of ours. */
enum { MOST_A_CALL_NS = 5000 };

/* One mask for each NCCL in the process: a second one may be linked into another library. */
static struct {
    int *nccl;
    int base;   /* what this interface version can give us */
    int theirs; /* what the chained plugin wants; it may change it when it likes */
    int told;   /* it was told what is wanted, and what it was told */
    int ours;
} masks[MOST_MASKS];
static struct ladder ladder = {.wait = FIRST_WAIT};
static uint32_t level; /* of the ladder, for all threads */
static uint32_t gaps;
static uint32_t paused;
static int32_t held = -1; /* a level at which a measurement holds us, or -1 */
static uint32_t adapts;
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

/* Pure: which of the events that we could have are wanted at this level. */
__attribute__((visibility("default"))) int megascale_profiler_wanted(int base, uint32_t at) {
    if (at >= LEVEL_NO_CHANNELS) base &= ~EVENT_KERNEL_CH;
    if (at >= LEVEL_NO_P2P) base &= ~EVENT_P2P;
    return base;
}

static bool is_held(void) { return LOAD(&held) >= 0; }

unsigned level_now(void) { return is_held() ? (unsigned)LOAD(&held) : LOAD(&level); }

/* Since sends and receives were once left out, ours are not counted as the peers count theirs. */
void budget_adapt(bool yes) { STORE(&adapts, yes); }
bool budget_adapts(void) { return LOAD(&adapts); }

bool p2p_has_gaps(void) { return LOAD(&gaps); }

/* Tell every NCCL what is wanted now. */
void budget_refresh(void) {
    profiler_page *page = LOAD_ACQUIRE(&megascale_page);
    int all = 0;
    for (int at = 0; at < MOST_MASKS; at++) {
        int *nccl = LOAD_ACQUIRE(&masks[at].nccl);
        if (nccl == NULL) continue;
        int ours = box_given_up() ? 0 : megascale_profiler_wanted(LOAD(&masks[at].base), level_now());
        if (!is_held()) {
            if (!budget_adapts() && LOAD(&masks[at].told)) ours = LOAD(&masks[at].ours);
            STORE(&masks[at].ours, ours);
            STORE(&masks[at].told, 1);
        }
        if (LOAD(&paused)) ours = 0;
        int wanted = ours | LOAD(&masks[at].theirs);
        if (LOAD(nccl) != wanted) STORE(nccl, wanted);
        all |= wanted;
    }
    STORE(&page->mask, (uint64_t)(uint32_t)all);
    STORE(&page->level, level_now());
}

/* For measurements in one process: ask for nothing, and for everything again. A chained plugin goes on. */
__attribute__((visibility("default"))) void megascale_profiler_pause(int pause) {
    STORE(&paused, pause != 0);
    budget_refresh();
}

/* Likewise: stay at a level of the ladder, and ask NCCL for no more; -1 lets the budget decide again. */
__attribute__((visibility("default"))) void megascale_profiler_hold(int at) {
    STORE(&held, at);
    budget_refresh();
}

/* Remember where an NCCL reads its mask; `theirs` is where the chained plugin may write its own. */
void budget_add(int *mask, int base, int **theirs) {
    static int nobody;
    *theirs = &nobody;
    for (int at = 0; at < MOST_MASKS; at++) {
        int *found = NULL;
        if (__atomic_compare_exchange_n(&masks[at].nccl, &found, mask, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE) ||
            found == mask) {
            STORE(&masks[at].base, base);
            *theirs = &masks[at].theirs;
            return;
        }
    }
    STORE(mask, base);
}

static void look(int64_t now_ns) {
    int64_t before_ns = LOAD(&looked_ns);
    if (now_ns - before_ns < LOOK_EVERY_NS || __atomic_exchange_n(&looking, 1, __ATOMIC_ACQUIRE)) return;
    if (LOAD(&looked_ns) == before_ns) {
        profiler_page *page = LOAD_ACQUIRE(&megascale_page);
        uint64_t own_ns = LOAD(&page->own_ns);
        /* The box's page begins at zero when it takes over from ours: then there is nothing to compare with. */
        if (before_ns && own_ns >= own_ns_before) {
            uint64_t share_ppm = (own_ns - own_ns_before) * 1000 / ((uint64_t)(now_ns - before_ns) / 1000);
            megascale_profiler_decide(&ladder, share_ppm, LOAD(&page->budget_ppm));
            STORE(&page->share_ppm, share_ppm);
        }
        own_ns_before = own_ns;
        STORE(&level, ladder.level);
        if (ladder.level >= LEVEL_NO_P2P) STORE(&gaps, 1);
        STORE(&page->judged_mono_ns, now_ns);
        STORE(&looked_ns, now_ns);
        budget_refresh();
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
