/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What NCCL and a profiler plugin have agreed upon, interface versions 1 to 7 (NCCL 2.23 to 2.31), as far as we read it.
 *
 * The structs are ours, laid out so that every field stands where NCCL puts it; the assertions hold them to the offsets
 * that were measured with NCCL's own headers on x86-64. Fields that nobody here reads are padding. Of version 7 only the
 * beginning is known, which is that of version 5, so nothing may depend on an event's size.
 */
#ifndef MEGASCALE_NCCL_ABI_H
#define MEGASCALE_NCCL_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Kinds of events, one bit each in the mask. */
enum {
    EVENT_GROUP = 1 << 0,
    EVENT_COLL = 1 << 1,
    EVENT_P2P = 1 << 2,
    EVENT_PROXY_OP = 1 << 3,
    EVENT_PROXY_STEP = 1 << 4,
    EVENT_PROXY_CTRL = 1 << 5,
    EVENT_KERNEL_CH = 1 << 6,  /* since 3 */
    EVENT_NET_PLUGIN = 1 << 7, /* since 3 */
    EVENT_GROUP_API = 1 << 8,  /* since 5, as the next three */
    EVENT_COLL_API = 1 << 9,
    EVENT_P2P_API = 1 << 10,
    EVENT_KERNEL_LAUNCH = 1 << 11,
    EVENT_CE_COLL = 1 << 12, /* copy engines; since 6, as the next two */
    EVENT_CE_SYNC = 1 << 13,
    EVENT_CE_BATCH = 1 << 14,
    EVENT_KERNEL_PHASE = 1 << 15, /* since 7 */
};

enum { STATE_KERNEL_CH_STOP = 22 }; /* since 4: comes with the GPU's clock, as the first word of its arguments */
enum { OLDEST_ABI = 1, NEWEST_ABI = 7, FIRST_TIMED_ABI = 4 };
/* NCCL 2.28 to 2.30: calls are told, and when a mask is taken was read in the source. Of 2.31 (7) it is not known. */
enum { FIRST_CALLS_ABI = 5, LAST_CALLS_ABI = 6 };

/* Versions 4 to 7. Up to 4 the kind is the first byte and the seven behind it are not initialised. */
struct event_v4 {
    union {
        uint8_t kind_byte;
        uint64_t kind;
    };
    void *parent;
    int32_t rank;
    int32_t padding;
    union {
        struct { /* also the copy engines' collectives of version 6, up to the datatype */
            uint64_t seq;
            const char *function;
            const void *sent, *received;
            size_t count;
            int32_t root;
            const char *datatype;
            uint8_t channels, warps;
            const char *algorithm, *protocol;
            void *parent_group; /* since 5 */
        } coll;
        struct {
            const char *function;
            void *buffer;
            const char *datatype;
            size_t count;
            int32_t peer;
            uint8_t channels;
            void *parent_group; /* since 5 */
        } p2p;
        struct { /* since 5, as the next two */
            bool is_captured;
            int32_t depth;
        } group_api;
        struct {
            const char *function;
            size_t count;
            const char *datatype;
            int32_t root;
            void *stream;
            bool is_captured;
        } coll_api;
        struct {
            const char *function;
            size_t count;
            const char *datatype;
            void *stream;
            bool is_captured;
        } p2p_api;
        struct {
            pid_t pid; /* of the process that has enqueued it: its handles mean nothing in another */
        } proxy_op;
        struct {
            uint8_t channel;
            uint64_t gpu_clock_ns;
        } kernel_ch;
    };
};

/* Versions 2 and 3: the communicator comes with every event; 2 has a field more before the channels. */
struct event_v2 {
    uint8_t kind;
    void *parent;
    int32_t rank;
    int32_t padding;
    union {
        struct {
            const char *name;
            uint64_t communicator, seq;
            const char *function;
            const void *sent, *received;
            size_t count;
            int32_t root;
            const char *datatype;
            uint8_t unread[8];
            uint8_t channels, warps;
            const char *algorithm, *protocol;
        } coll;
        struct {
            const char *name;
            uint64_t communicator, seq;
            const char *function;
            const void *sent, *received;
            size_t count;
            int32_t root;
            const char *datatype;
            uint8_t channels, warps;
            const char *algorithm, *protocol;
        } coll_v3;
        struct {
            const char *name;
            uint64_t communicator;
            const char *function;
            void *buffer;
            const char *datatype;
            size_t count;
            int32_t peer;
        } p2p;
        struct {
            pid_t pid;
        } proxy_op;
        struct {
            uint8_t channel;
        } kernel_ch;
    };
};

/* Version 1: numbers where later versions have words. */
struct event_v1 {
    uint8_t kind;
    void *parent;
    int32_t rank;
    int32_t padding;
    union {
        struct {
            const char *name;
            uint64_t communicator, seq;
            uint8_t function;
            const void *sent, *received;
            size_t count;
            int32_t root;
            uint8_t datatype;
            uint8_t unread[16];
            uint8_t padding[3];
            uint8_t channels, warps, algorithm, protocol;
        } coll;
        struct {
            const char *name;
            uint64_t communicator;
            uint8_t function;
            void *buffer;
            uint8_t datatype;
            size_t count;
            int32_t peer;
        } p2p;
        struct {
            pid_t pid;
        } proxy_op;
    };
};

/* A plugin as NCCL finds it, by the symbol ncclProfiler_v1 ... _v7. Every function answers 0 for success. */
typedef void (*log_function)(int level, unsigned long flags, const char *file, int line, const char *format, ...);
struct plugin {
    const char *name;
    union {
        int (*init_v1)(void **context, int *mask); /* 1 to 3 */
        int (*init_v4)(void **context, int *mask, const char *name, uint64_t id, int nodes, int ranks, int rank,
                       log_function say);
        int (*init_v5)(void **context, uint64_t id, int *mask, const char *name, int nodes, int ranks, int rank,
                       log_function say); /* 5 to 7 */
    };
    int (*start)(void *context, void **handle, void *event);
    int (*stop)(void *handle);
    int (*record)(void *handle, int state, void *arguments);
    int (*finalize)(void *context);
};

#define AT(type, field, offset) _Static_assert(offsetof(struct type, field) == (offset), #type "." #field)
AT(event_v4, parent, 8);
AT(event_v4, rank, 16);
AT(event_v4, coll.seq, 24);
AT(event_v4, coll.function, 32);
AT(event_v4, coll.sent, 40);
AT(event_v4, coll.received, 48);
AT(event_v4, coll.count, 56);
AT(event_v4, coll.root, 64);
AT(event_v4, coll.datatype, 72);
AT(event_v4, coll.channels, 80);
AT(event_v4, coll.warps, 81);
AT(event_v4, coll.algorithm, 88);
AT(event_v4, coll.protocol, 96);
AT(event_v4, coll.parent_group, 104);
AT(event_v4, p2p.function, 24);
AT(event_v4, p2p.datatype, 40);
AT(event_v4, p2p.count, 48);
AT(event_v4, p2p.peer, 56);
AT(event_v4, p2p.channels, 60);
AT(event_v4, p2p.parent_group, 64);
AT(event_v4, group_api.depth, 28);
AT(event_v4, coll_api.function, 24);
AT(event_v4, coll_api.is_captured, 64);
AT(event_v4, p2p_api.function, 24);
AT(event_v4, p2p_api.is_captured, 56);
AT(event_v4, proxy_op.pid, 24);
AT(event_v4, kernel_ch.channel, 24);
AT(event_v4, kernel_ch.gpu_clock_ns, 32);
_Static_assert(sizeof(struct event_v4) == 112, "event_v4");
AT(event_v2, parent, 8);
AT(event_v2, rank, 16);
AT(event_v2, coll.name, 24);
AT(event_v2, coll.communicator, 32);
AT(event_v2, coll.seq, 40);
AT(event_v2, coll.function, 48);
AT(event_v2, coll.sent, 56);
AT(event_v2, coll.received, 64);
AT(event_v2, coll.count, 72);
AT(event_v2, coll.root, 80);
AT(event_v2, coll.datatype, 88);
AT(event_v2, coll.channels, 104);
AT(event_v2, coll.warps, 105);
AT(event_v2, coll.algorithm, 112);
AT(event_v2, coll.protocol, 120);
AT(event_v2, coll_v3.channels, 96);
AT(event_v2, coll_v3.warps, 97);
AT(event_v2, coll_v3.algorithm, 104);
AT(event_v2, coll_v3.protocol, 112);
AT(event_v2, p2p.communicator, 32);
AT(event_v2, p2p.function, 40);
AT(event_v2, p2p.datatype, 56);
AT(event_v2, p2p.count, 64);
AT(event_v2, p2p.peer, 72);
AT(event_v2, proxy_op.pid, 24);
AT(event_v2, kernel_ch.channel, 24);
_Static_assert(sizeof(struct event_v2) == 128, "event_v2");
AT(event_v1, parent, 8);
AT(event_v1, rank, 16);
AT(event_v1, coll.name, 24);
AT(event_v1, coll.communicator, 32);
AT(event_v1, coll.seq, 40);
AT(event_v1, coll.function, 48);
AT(event_v1, coll.sent, 56);
AT(event_v1, coll.received, 64);
AT(event_v1, coll.count, 72);
AT(event_v1, coll.root, 80);
AT(event_v1, coll.datatype, 84);
AT(event_v1, coll.channels, 104);
AT(event_v1, coll.warps, 105);
AT(event_v1, coll.algorithm, 106);
AT(event_v1, coll.protocol, 107);
AT(event_v1, p2p.function, 40);
AT(event_v1, p2p.datatype, 56);
AT(event_v1, p2p.count, 64);
AT(event_v1, p2p.peer, 72);
AT(event_v1, proxy_op.pid, 24);
#undef AT

#endif
