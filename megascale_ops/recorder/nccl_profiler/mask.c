/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What NCCL is asked for: the word that every NCCL in the process reads, and who may change it when.
 *
 * By NCCL's source (2.28.3 to 2.30.7, src/plugin/profiler.cc and src/enqueue.cc) a collective, a send or a receive takes
 * its mask in ncclProfilerStartGroupApiEvent, for each of them once, before any of our callbacks for it; kernel, proxy
 * and channels all go by what it took. So a callback chooses for what its thread gives NCCL next. A collective may have
 * any mask, also another one than its neighbours in a group. A send and a receive that NCCL puts together may not: the
 * kernel notes its progress if the receive wants it, the send's proxy waits for that if the send wants it, for ever.
 *
 * So the mask changes between two groups (at a lone collective's call, or at GroupApi's end on the thread that made it),
 * which a single thread can't see from within one; and with the first send or receive that the process makes it changes
 * for the last time, to everything. Another thread may just have changed it between that operation's taking its mask and
 * our callback: what it took is not known then. Known is what it is. After a send everything is asked for, so that every
 * receive of its group wants channels; after a receive none until its group ends, so that no send does. Either way nobody
 * waits for what is not noted. What remains: the first of two threads at the same moment.
 *
 * The last change is a bit in the very word, so that no exchange of an older value can succeed behind it.
 */

#include "plugin.h"

enum { MOST_MASKS = 8 };
/* Bits of ours, far above NCCL's kinds, of which it tests single ones only. */
enum { WITHOUT_CHANNELS = 1 << 29, SETTLED = 1 << 30 };

/* One mask for each NCCL in the process: a second one may be linked into another library. */
static struct {
    int *nccl;
    int base;   /* what this interface version can give us */
    int turns;  /* its interface tells of calls and groups, as NCCL 2.28 to 2.30 do it */
    int theirs; /* what the chained plugin wants; it may change it when it likes */
    int told;   /* it was told what is wanted, and what it was told */
    int ours;
} masks[MOST_MASKS];
static uint32_t mode;
static uint32_t paused;
static uint32_t settled, any_turns;
static uint32_t holders; /* threads in a group whose first send or receive was a receive */

/* What this thread's group has told so far. */
static __thread struct {
    bool holds;     /* this group keeps the mask without channels until it ends */
    bool is_lone;   /* it is one call's own: nobody has opened it */
    bool has_call;  /* a collective was called */
    bool next_kept; /* what follows its last one is to have channels */
} group;

void mask_set_mode(enum mask_mode now) { STORE(&mode, now); }
bool mask_adapts(void) { return LOAD(&mode) == MASK_ADAPTS; }
bool mask_turns(void) { return LOAD(&any_turns) && !LOAD(&settled) && !is_held(); }

static int *word(int at) { return LOAD_ACQUIRE(&masks[at].nccl); }
static int full(int at) { return LOAD(&masks[at].ours) | LOAD(&masks[at].theirs); }
static int thin(int at) {
    int wanted = full(at);
    return LOAD(&masks[at].theirs) & EVENT_KERNEL_CH ? wanted : (wanted & ~EVENT_KERNEL_CH) | WITHOUT_CHANNELS;
}

static bool swap(int at, int old, int wanted) {
    return old == wanted || __atomic_compare_exchange_n(word(at), &old, wanted, false, __ATOMIC_ACQ_REL,
                                                        __ATOMIC_RELAXED);
}

/* Tell every NCCL what is wanted now. A mask that turns with the operations keeps its turn and its last word. */
static void refresh(bool anew) {
    profiler_page *page = LOAD_ACQUIRE(&megascale_page);
    int all = 0;
    for (int at = 0; at < MOST_MASKS; at++) {
        int *nccl = word(at);
        if (nccl == NULL) continue;
        int ours = box_given_up() ? 0 : megascale_profiler_wanted(LOAD(&masks[at].base), level_now());
        if (!is_held()) {
            if (!mask_adapts() && LOAD(&masks[at].told)) ours = LOAD(&masks[at].ours);
            STORE(&masks[at].ours, ours);
            STORE(&masks[at].told, 1);
        }
        if (LOAD(&paused)) ours = 0;
        int asked = ours | LOAD(&masks[at].theirs), old, wanted;
        do {
            old = LOAD(nccl), wanted = asked;
            if (LOAD(&masks[at].turns) && !LOAD(&paused) && !is_held()) {
                if (!anew && old & WITHOUT_CHANNELS) wanted = thin(at);
                if (old & SETTLED || LOAD(&settled)) wanted |= SETTLED;
            }
        } while (!swap(at, old, wanted));
        all |= asked;
    }
    STORE(&page->mask, (uint64_t)(uint32_t)all);
    STORE(&page->level, level_now());
}

void mask_refresh(void) { refresh(false); }

/* For measurements in one process: ask for nothing, and for everything again. A chained plugin goes on. */
__attribute__((visibility("default"))) void megascale_profiler_pause(int pause) {
    STORE(&paused, pause != 0);
    refresh(true);
}

/* Likewise: stay at a level of the ladder, and ask NCCL for no more; -1 lets the budget decide again. */
__attribute__((visibility("default"))) void megascale_profiler_hold(int at) {
    level_hold(at);
    refresh(true);
}

/* Remember where an NCCL reads its mask; `theirs` is where the chained plugin may write its own. Return its number. */
int mask_add(int *mask, int base, int abi, int **theirs) {
    static int nobody;
    *theirs = &nobody;
    for (int at = 0; at < MOST_MASKS; at++) {
        int *found = NULL;
        if (__atomic_compare_exchange_n(&masks[at].nccl, &found, mask, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE) ||
            found == mask) {
            bool turns = LOAD(&mode) == MASK_THINS && abi >= FIRST_CALLS_ABI && abi <= LAST_CALLS_ABI;
            STORE(&masks[at].base, base);
            STORE(&masks[at].turns, turns);
            if (turns) STORE(&any_turns, 1);
            *theirs = &masks[at].theirs;
            return at;
        }
    }
    STORE(mask, base);
    return -1;
}

static bool can_turn(const struct context *context) {
    int at = LOAD(&context->mask);
    return at >= 0 && LOAD(&masks[at].turns) && !LOAD(&paused) && !is_held();
}

/* The last word on every mask: all of it, or without channels until it is lifted. */
static void settle(bool channels) {
    STORE(&settled, 1);
    for (int at = 0; at < MOST_MASKS; at++) {
        int *nccl = word(at);
        if (nccl == NULL || !LOAD(&masks[at].turns)) continue;
        int old;
        do {
            old = LOAD(nccl);
        } while (!(old & SETTLED) && !swap(at, old, (channels ? full(at) : thin(at)) | SETTLED));
    }
}

static void lift(void) {
    for (int at = 0; at < MOST_MASKS; at++) {
        int *nccl = word(at);
        if (nccl == NULL || !LOAD(&masks[at].turns)) continue;
        int old;
        do {
            old = LOAD(nccl);
        } while (old & WITHOUT_CHANNELS && !swap(at, old, full(at) | SETTLED));
    }
}

static void release(void) {
    group.holds = false;
    if (__atomic_sub_fetch(&holders, 1, __ATOMIC_ACQ_REL) == 0) lift();
}

/* For the next group of this thread. One try: whoever was quicker has settled it, or has chosen for one of his. */
static void turn(int at) {
    int old = LOAD(word(at));
    if (!(old & SETTLED) && !is_held() && !LOAD(&paused)) swap(at, old, group.next_kept ? full(at) : thin(at));
}

/*
 * The outermost group of a thread begins; depth 1 is a lone call's own. Its end need be known only of a group that holds
 * several calls, when something was left out already and the last word is not spoken.
 */
handle_t group_begin(const struct context *context, int depth) {
    group.is_lone = depth <= 1;
    if (group.holds) release(); /* the end of its last one was not told */
    if (group.is_lone || !can_turn(context) || !thinning_has_begun() || (LOAD(&settled) && !LOAD(&holders))) return 0;
    group.has_call = false;
    return make_handle(HANDLE_GROUP, (uint64_t)LOAD(&context->mask));
}

void group_end(handle_t handle) {
    int at = (int)(handle_number(handle) % MOST_MASKS);
    if (word(at) == NULL) return; /* no handle of ours */
    if (group.holds) {
        release();
    } else if (group.has_call) {
        turn(at);
    }
    group.has_call = false;
}

/*
 * A collective is called: what it took is what was asked for a moment ago. Its number on its communicator is the same
 * on all ranks, and decides what follows it.
 *
 * Once captured it can't be asked again, and without channels a replay tells of nothing: no more turns. NCCL counts a
 * captured collective if we keep a handle and it has channels; on other ranks it might have none, so we keep no handle.
 */
handle_t collective_call(struct context *context, bool is_captured) {
    if (!can_turn(context)) return 0;
    bool has_channels = LOAD(word(LOAD(&context->mask))) & EVENT_KERNEL_CH;
    uint64_t number = COUNT(&context->calls);
    if (is_captured && !LOAD(&settled)) settle(true);
    group.has_call = true;
    group.next_kept = thinning_keeps(number + 1);
    if (group.is_lone && thinning_has_begun()) turn(LOAD(&context->mask));
    if (has_channels && (is_captured || !thinning_has_begun())) return 0;
    return make_handle(HANDLE_CALL, 1) | (has_channels ? HANDLE_TIMED : 0);
}

/*
 * A send or a receive is called. `in_group` is the handle of its group, where there is one. A lone call (an all-to-all of
 * NCCL's own, too) begins with a send or has none, so what it took need not be known.
 */
handle_t p2p_call(const struct context *context, handle_t in_group, bool sends) {
    if (!can_turn(context) || (LOAD(&settled) && !LOAD(&holders))) return 0;
    bool has_channels = LOAD(word(LOAD(&context->mask))) & EVENT_KERNEL_CH;
    if (group.holds) {
        /* it goes on as it began */
    } else if (handle_kind(in_group) == HANDLE_GROUP && (LOAD(&holders) || !sends)) {
        group.holds = true;
        __atomic_add_fetch(&holders, 1, __ATOMIC_ACQ_REL);
        settle(false);
    } else {
        settle(true);
    }
    return has_channels ? 0 : make_handle(HANDLE_CALL, 1);
}
