/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A second plugin behind ours: NCCL loads one only, MEGASCALE_CHAIN_PROFILER names the other.
 *
 * It gets every call of the kinds that it has asked for (and of their ancestors, as from NCCL), with its own contexts
 * and handles. Where both keep a handle, NCCL keeps the number of a pair. A pair is used again when it was stopped and
 * 65,536 newer ones have come; one that was not stopped is never taken away.
 */

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "plugin.h"

enum { MOST_PAIRS = 1 << 16, PAIR_TRIES = 16 };

struct pair {
    uint64_t number; /* plus one; 0 while it is made */
    uint64_t in_use; /* not stopped yet */
    handle_t ours;
    void *theirs;
    const struct plugin *plugin;
};
static struct pair pairs[MOST_PAIRS];
static uint64_t next_pair;

/* NCCL starts the ancestors of what was asked for as well: what else a plugin with this mask gets to see. */
static uint64_t with_ancestors(uint64_t mask) {
    static const struct {
        uint64_t kind, parents;
    } rows[] = {
        {EVENT_KERNEL_PHASE, EVENT_KERNEL_CH},
        {EVENT_KERNEL_CH, EVENT_COLL | EVENT_P2P},
        {EVENT_NET_PLUGIN, EVENT_PROXY_STEP},
        {EVENT_PROXY_STEP, EVENT_PROXY_OP},
        {EVENT_PROXY_OP, EVENT_COLL | EVENT_P2P},
        {EVENT_CE_SYNC | EVENT_CE_BATCH, EVENT_CE_COLL},
        {EVENT_CE_COLL, EVENT_COLL_API},
        {EVENT_COLL, EVENT_COLL_API | EVENT_GROUP},
        {EVENT_P2P, EVENT_P2P_API | EVENT_GROUP},
        {EVENT_COLL_API | EVENT_P2P_API | EVENT_KERNEL_LAUNCH, EVENT_GROUP_API},
    };
    for (size_t at = 0; at < sizeof rows / sizeof rows[0]; at++) {
        if (mask & rows[at].kind) mask |= rows[at].parents;
    }
    return mask;
}

/*
 * A path, or as NCCL has it a name of which libnccl-profiler-<name>.so is made. Of two failures the first is told where
 * it is about something else than the name itself: then there is such a library, and it lacks another one, or a symbol.
 */
static void *load_library(const char *named) {
    char file[4096], why[256];
    void *library = dlopen(named, RTLD_NOW | RTLD_LOCAL);
    if (library != NULL) return library;
    snprintf(why, sizeof why, "%s", dlerror());
    if (strchr(named, '/') == NULL && snprintf(file, sizeof file, "libnccl-profiler-%s.so", named) < (int)sizeof file) {
        library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
        if (library == NULL && strncmp(why, named, strlen(named)) == 0) snprintf(why, sizeof why, "%s", dlerror());
    }
    if (library == NULL) box_complain("MEGASCALE_CHAIN_PROFILER can't be loaded: ", why);
    return library;
}

/* The chained plugin as NCCL's interface version knows it; NULL when there is none. */
static const struct plugin *chained_plugin(int abi) {
    static void *library;
    const char *named = getenv("MEGASCALE_CHAIN_PROFILER");
    if (named == NULL || *named == '\0') return NULL;
    void *loaded = LOAD_ACQUIRE(&library);
    if (loaded == NULL) {
        loaded = load_library(named);
        if (loaded == NULL) return NULL;
        STORE_RELEASE(&library, loaded);
    }
    /* It would load itself for ever; a copy of it, from another cache, would write everything twice. */
    if (dlsym(loaded, "megascale_profiler_decide") != NULL) {
        box_complain("MEGASCALE_CHAIN_PROFILER names this plugin itself, which is not loaded twice", NULL);
        return NULL;
    }
    char symbol[32];
    snprintf(symbol, sizeof symbol, "ncclProfiler_v%d", abi);
    const struct plugin *found = dlsym(loaded, symbol);
    if (found == NULL) box_complain("the plugin of MEGASCALE_CHAIN_PROFILER has no ", symbol);
    return found;
}

void chain_init(struct context *context, int abi, int *mask, const char *name, uint64_t id, int nodes, int ranks,
                int rank, log_function say) {
    const struct plugin *plugin = chained_plugin(abi);
    void *theirs = NULL;
    if (plugin == NULL) return;
    int failed, before = LOAD(mask); /* what it wants of the communicators that it has */
    if (abi < 4) {
        failed = plugin->init_v1(&theirs, mask);
    } else if (abi == 4) {
        failed = plugin->init_v4(&theirs, mask, name, id, nodes, ranks, rank, say);
    } else {
        failed = plugin->init_v5(&theirs, id, mask, name, nodes, ranks, rank, say);
    }
    if (failed) {
        STORE(mask, before);
        box_complain("the plugin of MEGASCALE_CHAIN_PROFILER could not begin and is left out", NULL);
        return;
    }
    STORE(&context->theirs, theirs);
    STORE_RELEASE(&context->chained, plugin);
    STORE(&LOAD_ACQUIRE(&megascale_page)->chained, 1);
}

void chain_finalize(struct context *context) {
    const struct plugin *plugin = __atomic_exchange_n(&context->chained, NULL, __ATOMIC_ACQ_REL);
    if (plugin != NULL) plugin->finalize(LOAD(&context->theirs));
}

static struct pair *new_pair(uint64_t *number) {
    for (int tried = 0; tried < PAIR_TRIES; tried++) {
        *number = COUNT(&next_pair);
        struct pair *pair = &pairs[*number % MOST_PAIRS];
        uint64_t unused = 0;
        if (__atomic_compare_exchange_n(&pair->in_use, &unused, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
            STORE_RELEASE(&pair->number, 0);
            return pair;
        }
    }
    return NULL;
}

/* What stands behind a handle: ours and theirs. An unknown one is nobody's. */
static struct pair look_up(handle_t handle) {
    struct pair found = {0};
    if (handle_kind(handle) != HANDLE_PAIR) {
        found.ours = handle_kind(handle) == HANDLE_NONE ? 0 : handle;
        return found;
    }
    uint64_t number = handle_number(handle) + 1;
    struct pair *pair = &pairs[handle_number(handle) % MOST_PAIRS];
    if (LOAD_ACQUIRE(&pair->number) != number) return found;
    found.ours = LOAD_ACQUIRE(&pair->ours);
    found.theirs = LOAD_ACQUIRE(&pair->theirs);
    found.plugin = LOAD_ACQUIRE(&pair->plugin);
    if (LOAD(&pair->number) != number) return (struct pair){0}; /* it was used again meanwhile */
    return found;
}

handle_t chain_ours(handle_t handle) { return look_up(handle).ours; }

/* Put their handles where NCCL has put ours, and back again: the event lies on the stack of NCCL's caller. */
static void swap_parents(uint64_t kind, int abi, struct event_v4 *event, void *parents[2], bool to_theirs) {
    void **group = NULL;
    if (abi >= 5 && kind == EVENT_COLL) group = &event->coll.parent_group;
    if (abi >= 5 && kind == EVENT_P2P) group = &event->p2p.parent_group;
    void **places[2] = {&event->parent, group};
    for (int at = 0; at < 2; at++) {
        if (places[at] == NULL) continue;
        if (to_theirs) {
            parents[at] = *places[at];
            *places[at] = look_up((handle_t)(uintptr_t)parents[at]).theirs;
        } else {
            *places[at] = parents[at];
        }
    }
}

/* Give the event to the chained plugin; return what NCCL shall keep. */
handle_t chain_start(struct context *context, int abi, uint64_t kind, void *event, handle_t ours) {
    const struct plugin *plugin = LOAD_ACQUIRE(&context->chained);
    if (plugin == NULL) return ours;
    if (!(with_ancestors((uint64_t)LOAD(LOAD(&context->their_mask))) & kind)) return ours;
    /* A proxy's event of another process carries a handle of that process: nothing here may look into it. */
    bool foreign = kind == EVENT_PROXY_OP && ((struct event_v4 *)event)->proxy_op.pid != getpid();
    uint64_t number;
    struct pair *pair = new_pair(&number);
    if (pair == NULL) {
        COUNT(&LOAD_ACQUIRE(&megascale_page)->chain_lost);
        return ours;
    }
    void *theirs = NULL, *parents[2];
    if (!foreign) swap_parents(kind, abi, event, parents, true);
    plugin->start(LOAD(&context->theirs), &theirs, event);
    if (!foreign) swap_parents(kind, abi, event, parents, false);
    if (theirs == NULL) {
        STORE_RELEASE(&pair->in_use, 0);
        return ours;
    }
    STORE(&pair->ours, ours);
    STORE(&pair->theirs, theirs);
    STORE(&pair->plugin, plugin);
    STORE_RELEASE(&pair->number, number + 1);
    return make_handle(HANDLE_PAIR, number);
}

void chain_stop(handle_t handle) {
    struct pair found = look_up(handle);
    if (found.plugin == NULL) return;
    struct pair *pair = &pairs[handle_number(handle) % MOST_PAIRS];
    uint64_t used = 1;
    if (!__atomic_compare_exchange_n(&pair->in_use, &used, 2, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return;
    found.plugin->stop(found.theirs);
    STORE_RELEASE(&pair->in_use, 0);
}

void chain_record(handle_t handle, int state, void *arguments) {
    struct pair found = look_up(handle);
    if (found.plugin != NULL) found.plugin->record(found.theirs, state, arguments);
}
