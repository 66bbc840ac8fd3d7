/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plugin as NCCL sees it: one table of functions for each interface version, of which NCCL takes the newest that it
 * knows. Each reads the events of its version and hands on what they say.
 *
 * No function ever fails: an init that fails makes some versions of NCCL go on with a plugin that they have given up.
 */

#include <stdlib.h>
#include <string.h>

#include "plugin.h"

enum { SUCCESS = 0, DEFAULT_BUDGET_PPM = 5000, DEFAULT_THIN_AFTER_S = 30 };

/* A setting in ten-thousandths; `missing` where there is none, or none that can be read, which is said. */
static uint64_t read_setting(const char *name, uint64_t missing, uint64_t most, const char *complaint) {
    const char *text = getenv(name);
    if (text == NULL || *text == '\0') return missing;
    const char *first = text + strspn(text, " ");
    char *end;
    /* strtod would want a comma where the script has set such a locale. */
    unsigned long parts = strtoul(text, &end, 10), digit = 1000;
    bool is_number = *first >= '0' && *first <= '9' && parts <= most / 10000; /* strtoul takes signs, too */
    parts *= 10000;
    if (*end == '.') {
        for (end++; *end >= '0' && *end <= '9'; end++, digit /= 10) parts += digit * (unsigned long)(*end - '0');
    }
    if (!is_number || *end != '\0' || parts > most) {
        box_complain(complaint, text);
        return missing;
    }
    return parts;
}

/* MEGASCALE_PROFILER_BUDGET: per cent of the wall time. Ten-thousandths of it are parts of a million. */
static uint64_t read_budget_ppm(void) {
    return read_setting("MEGASCALE_PROFILER_BUDGET", DEFAULT_BUDGET_PPM, 1000000,
                        "MEGASCALE_PROFILER_BUDGET is no number from 0 to 100 (per cent), so 0.5 is used: ");
}

/* MEGASCALE_PROFILER_THIN_AFTER: seconds with collectives in which nothing was sent or received. */
static uint64_t read_thin_after_ns(void) {
    return read_setting("MEGASCALE_PROFILER_THIN_AFTER", DEFAULT_THIN_AFTER_S * 10000, 36000000,
                        "MEGASCALE_PROFILER_THIN_AFTER is no number from 0 to 3600 (seconds), so 30 is used: ") *
           100000;
}

/* MEGASCALE_PROFILER_MASK: thin, adapt, fixed, or nothing, which is thin. */
static enum mask_mode read_mode(void) {
    const char *text = getenv("MEGASCALE_PROFILER_MASK");
    if (text == NULL || *text == '\0' || strcmp(text, "thin") == 0) return MASK_THINS;
    if (strcmp(text, "adapt") == 0) return MASK_ADAPTS;
    if (strcmp(text, "fixed") != 0) {
        box_complain("MEGASCALE_PROFILER_MASK is thin, adapt or fixed, so fixed is used: ", text);
    }
    return MASK_FIXED;
}

static int wanted_at_most(int abi) {
    return EVENT_COLL | EVENT_P2P | (abi >= 3 ? EVENT_KERNEL_CH : 0) | (abi >= 6 ? EVENT_CE_COLL : 0);
}

static int begin(int abi, void **context, int *mask, const char *name, uint64_t id, int nodes, int ranks, int rank,
                 log_function say) {
    if (context == NULL || mask == NULL) return SUCCESS;
    STORE(&LOAD_ACQUIRE(&megascale_page)->budget_ppm, read_budget_ppm());
    mask_set_mode(read_mode());
    thinning_set_after(read_thin_after_ns());
    box_open(0);
    profiler_page *page = LOAD_ACQUIRE(&megascale_page);
    STORE(&page->abi, (uint64_t)abi);
    COUNT(&page->inits);
    handle_t handle = context_open(name, id, nodes, ranks, rank);
    int *theirs;
    int number = mask_add(mask, wanted_at_most(abi), abi, &theirs);
    struct context *opened = context_of(handle);
    if (opened != NULL) {
        STORE(&opened->mask, number);
        STORE(&opened->their_mask, theirs);
        chain_init(opened, abi, theirs, name, id, nodes, ranks, rank, say);
    }
    mask_refresh();
    *context = (void *)(uintptr_t)handle;
    return SUCCESS;
}

static int begin_v1(int abi, void **context, int *mask) {
    return begin(abi, context, mask, NULL, 0, 0, 0, -1, NULL);
}

/* Say whether an operation's channels come, and whether they are wanted: the flags of its record. */
static uint32_t extra_flags(uint64_t kind) {
    int asked = (int)LOAD(&LOAD_ACQUIRE(&megascale_page)->mask) & megascale_profiler_wanted(EVENT_KERNEL_CH, level_now());
    uint32_t flags = asked || kind == EVENT_CE_COLL ? 0 : MEGASCALE_NCCL_FLAG_UNTIMED | MEGASCALE_NCCL_FLAG_DONE;
    return flags | (kind == EVENT_P2P && p2p_has_gaps() ? MEGASCALE_NCCL_FLAG_UNMATCHED : 0);
}

/* Where the mask turns, the call that an operation belongs to knows whether it has channels. */
static void set_turn(struct operation *said, handle_t call) {
    const uint32_t untimed = MEGASCALE_NCCL_FLAG_UNTIMED | MEGASCALE_NCCL_FLAG_DONE;
    if (handle_kind(call) != HANDLE_CALL) return;
    said->is_thinned = !(call & HANDLE_TIMED);
    said->is_kept = !said->is_thinned && mask_turns();
    if (said->is_thinned) said->flags |= untimed;
    if (said->is_kept) said->flags &= ~untimed;
}

static handle_t start_v4(struct context *context, int abi, uint64_t kind, handle_t parent, const struct event_v4 *event) {
    struct operation said = {.peer = -1, .root = -1, .flags = extra_flags(kind)};
    switch (kind) {
    case EVENT_COLL:
        said.algorithm = algorithm_code(event->coll.algorithm);
        said.protocol = protocol_code(event->coll.protocol);
        said.channels = event->coll.channels;
        said.flags |= MEGASCALE_NCCL_FLAG_EXACT_CHANNELS;
        set_turn(&said, parent);
        break;
    case EVENT_CE_COLL:
        said.flags |= MEGASCALE_NCCL_FLAG_COPY_ENGINE | MEGASCALE_NCCL_FLAG_HOST_CLOCK;
        break;
    case EVENT_P2P:
        said.function = function_code(event->p2p.function);
        said.datatype = datatype_code(event->p2p.datatype);
        said.count = event->p2p.count;
        said.peer = event->p2p.peer;
        said.seq = context_next(context, said.peer, said.function == MEGASCALE_NCCL_FUNCTION_SEND);
        said.channels = event->p2p.channels <= MOST_CHANNELS ? event->p2p.channels : 0;
        said.is_p2p = true;
        set_turn(&said, parent);
        return operation_start(context, &said);
    case EVENT_KERNEL_CH:
        return channel_start(context, parent, event->kernel_ch.channel, event->kernel_ch.gpu_clock_ns,
                             abi >= FIRST_TIMED_ABI);
    case EVENT_GROUP_API:
        return group_begin(context, event->group_api.depth);
    case EVENT_COLL_API:
        return collective_call(context, event->coll_api.is_captured);
    case EVENT_P2P_API:
        return p2p_call(context, parent, function_code(event->p2p_api.function) == MEGASCALE_NCCL_FUNCTION_SEND);
    default:
        return 0;
    }
    said.seq = event->coll.seq;
    said.function = function_code(event->coll.function);
    said.datatype = datatype_code(event->coll.datatype);
    said.count = event->coll.count;
    said.root = event->coll.root;
    if (kind == EVENT_COLL) thinning_reckon(context, &said);
    return operation_start(context, &said);
}

static handle_t start_v2(struct context *context, int abi, uint64_t kind, handle_t parent, const struct event_v2 *event) {
    struct operation said = {.peer = -1, .root = -1, .flags = extra_flags(kind)};
    switch (kind) {
    case EVENT_COLL:
        context_identify(context, event->coll.name, event->coll.communicator, event->rank);
        said.seq = event->coll.seq;
        said.function = function_code(event->coll.function);
        said.datatype = datatype_code(event->coll.datatype);
        said.count = event->coll.count;
        said.root = event->coll.root;
        said.channels = abi == 2 ? event->coll.channels : event->coll_v3.channels;
        said.algorithm = algorithm_code(abi == 2 ? event->coll.algorithm : event->coll_v3.algorithm);
        said.protocol = protocol_code(abi == 2 ? event->coll.protocol : event->coll_v3.protocol);
        return operation_start(context, &said);
    case EVENT_P2P:
        context_identify(context, event->p2p.name, event->p2p.communicator, event->rank);
        said.function = function_code(event->p2p.function);
        said.datatype = datatype_code(event->p2p.datatype);
        said.count = event->p2p.count;
        said.peer = event->p2p.peer;
        said.seq = context_next(context, said.peer, said.function == MEGASCALE_NCCL_FUNCTION_SEND);
        said.is_p2p = true;
        return operation_start(context, &said);
    case EVENT_KERNEL_CH:
        return channel_start(context, parent, event->kernel_ch.channel, 0, false);
    default:
        return 0;
    }
}

/* NCCL's numbers are our codes, less one. */
static handle_t start_v1(struct context *context, uint64_t kind, const struct event_v1 *event) {
    struct operation said = {.peer = -1, .root = -1, .flags = extra_flags(kind)};
    switch (kind) {
    case EVENT_COLL:
        context_identify(context, event->coll.name, event->coll.communicator, event->rank);
        said.seq = event->coll.seq;
        said.function = event->coll.function + 1u;
        said.datatype = event->coll.datatype + 1u;
        said.count = event->coll.count;
        said.root = event->coll.root;
        said.channels = event->coll.channels;
        said.algorithm = event->coll.algorithm + 1u;
        said.protocol = event->coll.protocol + 1u;
        return operation_start(context, &said);
    case EVENT_P2P:
        context_identify(context, event->p2p.name, event->p2p.communicator, event->rank);
        said.function = event->p2p.function + 1u;
        said.datatype = event->p2p.datatype + 1u;
        said.count = event->p2p.count;
        said.peer = event->p2p.peer;
        said.seq = context_next(context, said.peer, said.function == MEGASCALE_NCCL_FUNCTION_SEND);
        said.is_p2p = true;
        return operation_start(context, &said);
    default:
        return 0;
    }
}

static int start(int abi, void *context_handle, void **handle, void *event) {
    int64_t begun_ns = watch_begin();
    struct context *context = context_of((handle_t)(uintptr_t)context_handle);
    handle_t ours = 0;
    if (handle == NULL || event == NULL) return SUCCESS;
    *handle = NULL;
    if (context == NULL) {
        COUNT(&LOAD_ACQUIRE(&megascale_page)->dropped_no_context);
        return SUCCESS;
    }
    /* Up to version 4 the seven bytes behind the kind hold whatever was on the stack. */
    uint64_t kind = abi >= 5 ? ((struct event_v4 *)event)->kind : ((struct event_v4 *)event)->kind_byte;
    handle_t parent = chain_ours((handle_t)(uintptr_t)((struct event_v4 *)event)->parent);
    if (kind == EVENT_P2P && level_now() >= LEVEL_NO_P2P) {
        COUNT(&LOAD_ACQUIRE(&megascale_page)->unsampled); /* asked for all the same, or while the mask changed */
    } else if (abi >= 4) {
        ours = start_v4(context, abi, kind, parent, event);
    } else if (abi >= 2) {
        ours = start_v2(context, abi, kind, parent, event);
    } else {
        ours = start_v1(context, kind, event);
    }
    watch_end(begun_ns);
    *handle = (void *)(uintptr_t)chain_start(context, abi, kind, event, ours);
    return SUCCESS;
}

static int stop(void *handle) {
    if (handle_kind((handle_t)(uintptr_t)handle) == HANDLE_CALL) return SUCCESS; /* its end says nothing */
    int64_t begun_ns = watch_begin();
    handle_t ours = chain_ours((handle_t)(uintptr_t)handle);
    switch (handle_kind(ours)) {
    case HANDLE_CHANNEL:
        channel_end(ours, 0);
        break;
    case HANDLE_GROUP:
        group_end(ours);
        break;
    default:
        operation_stop(ours);
    }
    watch_end(begun_ns);
    chain_stop((handle_t)(uintptr_t)handle);
    return SUCCESS;
}

static int record(void *handle, int state, void *arguments) {
    int64_t begun_ns = watch_begin();
    handle_t ours = chain_ours((handle_t)(uintptr_t)handle);
    if (handle_kind(ours) == HANDLE_CHANNEL && ours & HANDLE_TIMED && state == STATE_KERNEL_CH_STOP && arguments) {
        channel_end(ours, *(uint64_t *)arguments);
    }
    watch_end(begun_ns);
    chain_record((handle_t)(uintptr_t)handle, state, arguments);
    return SUCCESS;
}

static int finalize(void *context) {
    context_close((handle_t)(uintptr_t)context);
    return SUCCESS;
}

#define INIT_V1(abi)                                                                                                   \
    static int init_##abi(void **context, int *mask) { return begin_v1(abi, context, mask); }
#define INIT_V4(abi)                                                                                                   \
    static int init_##abi(void **context, int *mask, const char *name, uint64_t id, int nodes, int ranks, int rank,    \
                          log_function say) {                                                                          \
        return begin(abi, context, mask, name, id, nodes, ranks, rank, say);                                           \
    }
#define INIT_V5(abi)                                                                                                   \
    static int init_##abi(void **context, uint64_t id, int *mask, const char *name, int nodes, int ranks, int rank,    \
                          log_function say) {                                                                          \
        return begin(abi, context, mask, name, id, nodes, ranks, rank, say);                                           \
    }
#define PLUGIN(abi, init, member)                                                                                      \
    init(abi) static int start_##abi(void *context, void **handle, void *event) {                                      \
        return start(abi, context, handle, event);                                                                     \
    }                                                                                                                  \
    __attribute__((visibility("default"))) struct plugin ncclProfiler_v##abi = {                                       \
        .name = "megascale-ops",                                                                                       \
        .member = init_##abi,                                                                                          \
        .start = start_##abi,                                                                                          \
        .stop = stop,                                                                                                  \
        .record = record,                                                                                              \
        .finalize = finalize,                                                                                          \
    };

PLUGIN(1, INIT_V1, init_v1)
PLUGIN(2, INIT_V1, init_v1)
PLUGIN(3, INIT_V1, init_v1)
PLUGIN(4, INIT_V4, init_v4)
PLUGIN(5, INIT_V5, init_v5)
PLUGIN(6, INIT_V5, init_v5)
PLUGIN(7, INIT_V5, init_v5)
