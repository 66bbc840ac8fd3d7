/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The map of a black box for C and CUDA. Printed from layout.py by
 *     python -m megascale_ops.blackbox.layout > megascale_ops/blackbox/blackbox.h
 * and compared with it by a test. Little-endian; layout.py explains rings and sequence numbers.
 */
#ifndef MEGASCALE_BLACKBOX_H
#define MEGASCALE_BLACKBOX_H

#include <stddef.h>
#include <stdint.h>

#define MEGASCALE_BOX_MAGIC "MGSCLBOX"
#define MEGASCALE_BOX_VERSION 3u
#define MEGASCALE_BOX_HEADER_BYTES 4096u
#define MEGASCALE_BOX_FILE_BYTES 413696u
#define MEGASCALE_BOX_FLAG_ABSOLUTE 1u
#define MEGASCALE_BOX_NUMBER_BITS 48u
#define MEGASCALE_BOX_STATE_STARTING 0u
#define MEGASCALE_BOX_STATE_RUNNING 1u
#define MEGASCALE_BOX_STATE_EXITED 2u
#define MEGASCALE_NCCL_FLAG_DONE 1u
#define MEGASCALE_NCCL_FLAG_UNTIMED 2u
#define MEGASCALE_NCCL_FLAG_HOST_CLOCK 4u
#define MEGASCALE_NCCL_FLAG_DOUBTFUL 8u
#define MEGASCALE_NCCL_FLAG_UNMATCHED 16u
#define MEGASCALE_NCCL_FLAG_EXACT_CHANNELS 32u
#define MEGASCALE_NCCL_FLAG_COPY_ENGINE 64u

#define MEGASCALE_NCCL_FUNCTIONS \
    "Unknown", \
    "Broadcast", \
    "Reduce", \
    "AllGather", \
    "ReduceScatter", \
    "AllReduce", \
    "SendRecv", \
    "Send", \
    "Recv", \
    "AlltoAll", \
    "Scatter", \
    "Gather", \
    "AllGatherV", \
    "PutSignal", \
    "Signal", \
    "WaitSignal",

#define MEGASCALE_NCCL_DATATYPES \
    "Unknown", \
    "ncclInt8", \
    "ncclUint8", \
    "ncclInt32", \
    "ncclUint32", \
    "ncclInt64", \
    "ncclUint64", \
    "ncclFloat16", \
    "ncclFloat32", \
    "ncclFloat64", \
    "ncclBfloat16", \
    "ncclFloat8e4m3", \
    "ncclFloat8e5m2",

#define MEGASCALE_NCCL_ALGORITHMS \
    "Unknown", \
    "TREE", \
    "RING", \
    "COLLNET_DIRECT", \
    "COLLNET_CHAIN", \
    "NVLS", \
    "NVLS_TREE", \
    "PAT",

#define MEGASCALE_NCCL_PROTOCOLS \
    "Unknown", \
    "LL", \
    "LL128", \
    "SIMPLE",

#define MEGASCALE_NCCL_FUNCTION_SEND 7u
#define MEGASCALE_NCCL_FUNCTION_ALL_GATHER 3u
#define MEGASCALE_NCCL_FUNCTION_REDUCE_SCATTER 4u
#define MEGASCALE_NCCL_DATATYPE_BYTES 1, 1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1

#define MEGASCALE_BOX_HEADER_OFFSET 0u
#define MEGASCALE_BOX_HEADER_SLOTS 1u
struct megascale_box_header {
    char magic[8];
    uint32_t version;
    uint32_t header_bytes;
    uint64_t file_bytes;
    int64_t round;
    int64_t pid;
    uint64_t start_ticks;
    double started_mono_s;
    double started_wall_s;
    int32_t rank;
    int32_t local_rank;
    int32_t world_size;
    int32_t tp;
    int32_t pp;
    int32_t dp;
    int32_t ep;
    uint32_t reserved;
    char job[104];
    char node[104];
    char stderr_path[1024];
    char padding[208];
};

#define MEGASCALE_BOX_ERROR_OFFSET 1536u
#define MEGASCALE_BOX_ERROR_SLOTS 2u
struct megascale_box_error {
    uint64_t sequence;
    int64_t step;
    char type[96];
    char where[384];
    char message[712];
    uint64_t told;
    double raised_mono_s;
    char thread[56];
};

#define MEGASCALE_BOX_NOW_OFFSET 4096u
#define MEGASCALE_BOX_NOW_SLOTS 4u
struct megascale_box_now {
    uint64_t sequence;
    int64_t step;
    uint64_t steps_seen;
    uint64_t flags;
    double phase_since_mono_s;
    char phase[32];
    char padding[56];
};

#define MEGASCALE_BOX_BEAT_OFFSET 4608u
#define MEGASCALE_BOX_BEAT_SLOTS 4u
struct megascale_box_beat {
    uint64_t sequence;
    int64_t enqueued;
    int64_t completed;
    double beat_mono_s;
    char name[64];
    char padding[32];
};

#define MEGASCALE_BOX_PULSE_OFFSET 5120u
#define MEGASCALE_BOX_PULSE_SLOTS 1u
struct megascale_box_pulse {
    uint64_t state;
    double moved_mono_s;
    double wandered_mono_s;
    uint64_t wandered;
    char padding[32];
};

#define MEGASCALE_BOX_SERVER_OFFSET 5184u
#define MEGASCALE_BOX_SERVER_SLOTS 2u
struct megascale_box_server {
    uint64_t sequence;
    char worker_server_path[112];
    char padding[8];
};

#define MEGASCALE_BOX_SAVES_OFFSET 5440u
#define MEGASCALE_BOX_SAVES_SLOTS 3u
struct megascale_box_saves {
    uint64_t sequence;
    int64_t step;
    double stall_s;
    double write_s;
    int64_t sealed_step;
    double sealed_wall_s;
    uint64_t in_flight;
    uint64_t failed;
};

#define MEGASCALE_BOX_FINDINGS_OFFSET 5632u
#define MEGASCALE_BOX_FINDINGS_SLOTS 5u
struct megascale_box_findings {
    uint64_t sequence;
    int64_t step;
    double told_mono_s;
    char fault[32];
    char text[456];
};

#define MEGASCALE_BOX_STEPS_OFFSET 8192u
#define MEGASCALE_BOX_STEPS_SLOTS 256u
struct megascale_box_steps {
    uint64_t sequence;
    int64_t step;
    double ended_mono_s;
    double wall_s;
    double data_s;
    double forward_s;
    double backward_s;
    double optimizer_s;
    double checkpoint_s;
    double waiting_s;
};

#define MEGASCALE_BOX_COLLECTIVES_OFFSET 28672u
#define MEGASCALE_BOX_COLLECTIVES_SLOTS 1024u
struct megascale_box_collectives {
    uint64_t sequence;
    int64_t seq;
    int64_t bytes_moved;
    int64_t enqueued_mono_ns;
    int64_t started_mono_ns;
    int64_t ended_mono_ns;
    char communicator[24];
    char function[28];
    uint32_t passage;
};

#define MEGASCALE_BOX_PASSAGES_OFFSET 135168u
#define MEGASCALE_BOX_PASSAGES_SLOTS 384u
struct megascale_box_passages {
    uint64_t word;
};

#define MEGASCALE_BOX_PHASES_OFFSET 138240u
#define MEGASCALE_BOX_PHASES_SLOTS 26u
struct megascale_box_phases {
    char name[32];
};

#define MEGASCALE_BOX_EFFORTS_OFFSET 139264u
#define MEGASCALE_BOX_EFFORTS_SLOTS 256u
struct megascale_box_efforts {
    uint64_t sequence;
    double gc_s;
    double cpu_s;
    double loss;
    uint64_t has_loss;
};

#define MEGASCALE_BOX_PROFILER_OFFSET 151552u
#define MEGASCALE_BOX_PROFILER_SLOTS 1u
struct megascale_box_profiler {
    uint64_t abi;
    uint64_t inits;
    uint64_t mask;
    uint64_t level;
    uint64_t budget_ppm;
    uint64_t share_ppm;
    int64_t judged_mono_ns;
    int64_t opened_mono_ns;
    uint64_t nccl_next;
    uint64_t communicators_next;
    uint64_t dropped_late;
    uint64_t dropped_busy;
    uint64_t dropped_no_box;
    uint64_t dropped_no_context;
    uint64_t unsampled;
    uint64_t chain_lost;
    uint64_t events;
    uint64_t own_ns;
    uint64_t chained;
    uint64_t contexts_open;
    uint64_t has_complaint;
    char complaint[256];
    uint64_t untimed;
    uint64_t timed_one_in;
    char padding[72];
};

#define MEGASCALE_BOX_COMMUNICATORS_OFFSET 155648u
#define MEGASCALE_BOX_COMMUNICATORS_SLOTS 64u
struct megascale_box_communicators {
    uint64_t sequence;
    uint64_t id;
    int64_t opened_mono_ns;
    int64_t closed_mono_ns;
    int32_t nranks;
    int32_t rank;
    int32_t nnodes;
    uint32_t reserved;
    char name[72];
    char padding[8];
};

#define MEGASCALE_BOX_NCCL_OFFSET 163840u
#define MEGASCALE_BOX_NCCL_SLOTS 2048u
struct megascale_box_nccl {
    uint64_t sequence;
    int64_t seq;
    int64_t bytes_moved;
    int64_t enqueued_mono_ns;
    int64_t gpu_started_mono_ns;
    int64_t gpu_ended_mono_ns;
    uint64_t gpu_clock_ns;
    uint64_t communicator;
    int64_t step;
    uint64_t started_channels;
    uint64_t ended_channels;
    uint32_t function;
    uint32_t datatype;
    uint32_t algorithm;
    uint32_t protocol;
    uint32_t channels;
    int32_t peer;
    int32_t root;
    uint32_t flags;
};

#define MEGASCALE_BOX_MESH_OFFSET 409600u
#define MEGASCALE_BOX_MESH_SLOTS 2u
struct megascale_box_mesh {
    uint64_t sequence;
    int32_t tp;
    int32_t pp;
    int32_t dp;
    int32_t ep;
    char padding[8];
};

#define MEGASCALE_BOX_GPU_STEPS_OFFSET 409664u
#define MEGASCALE_BOX_GPU_STEPS_SLOTS 32u
struct megascale_box_gpu_steps {
    uint64_t sequence;
    uint64_t number;
    int64_t step;
    double wall_s;
    double data_s;
    double forward_s;
    double backward_s;
    double optimizer_s;
    double checkpoint_s;
};

#define MEGASCALE_BOX_GPU_PHASES_OFFSET 411968u
#define MEGASCALE_BOX_GPU_PHASES_SLOTS 28u
struct megascale_box_gpu_phases {
    uint64_t sequence;
    uint64_t number;
    double gpu_s;
    char phase[32];
};

#define MEGASCALE_BOX_RESTORES_OFFSET 413536u
#define MEGASCALE_BOX_RESTORES_SLOTS 2u
struct megascale_box_restores {
    uint64_t sequence;
    int64_t step;
    double restore_s;
    uint64_t read_bytes;
    uint64_t passed_over;
    uint64_t failed;
    uint64_t node;
    uint64_t buddy;
    uint64_t shared;
    uint64_t store;
};

#if defined(__cplusplus)
#define MEGASCALE_BOX_ASSERT(what) static_assert(what, #what)
#else
#define MEGASCALE_BOX_ASSERT(what) _Static_assert(what, #what)
#endif
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_header) == 1536);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, magic) == 0);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, version) == 8);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, header_bytes) == 12);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, file_bytes) == 16);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, round) == 24);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, pid) == 32);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, start_ticks) == 40);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, started_mono_s) == 48);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, started_wall_s) == 56);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, rank) == 64);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, local_rank) == 68);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, world_size) == 72);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, tp) == 76);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, pp) == 80);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, dp) == 84);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, ep) == 88);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, reserved) == 92);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, job) == 96);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, node) == 200);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_header, stderr_path) == 304);
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_error) == 1280);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_error, sequence) == 0);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_error, step) == 8);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_error, type) == 16);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_error, where) == 112);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_error, message) == 496);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_error, told) == 1208);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_error, raised_mono_s) == 1216);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_error, thread) == 1224);
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_now) == 128);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_now, sequence) == 0);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_now, step) == 8);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_now, steps_seen) == 16);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_now, flags) == 24);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_now, phase_since_mono_s) == 32);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_now, phase) == 40);
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_beat) == 128);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_beat, sequence) == 0);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_beat, enqueued) == 8);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_beat, completed) == 16);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_beat, beat_mono_s) == 24);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_beat, name) == 32);
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_pulse) == 64);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_pulse, state) == 0);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_pulse, moved_mono_s) == 8);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_pulse, wandered_mono_s) == 16);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_pulse, wandered) == 24);
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_server) == 128);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_server, sequence) == 0);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_server, worker_server_path) == 8);
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_saves) == 64);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_saves, sequence) == 0);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_saves, step) == 8);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_saves, stall_s) == 16);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_saves, write_s) == 24);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_saves, sealed_step) == 32);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_saves, sealed_wall_s) == 40);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_saves, in_flight) == 48);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_saves, failed) == 56);
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_findings) == 512);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_findings, sequence) == 0);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_findings, step) == 8);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_findings, told_mono_s) == 16);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_findings, fault) == 24);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_findings, text) == 56);
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_steps) == 80);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_steps, sequence) == 0);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_steps, step) == 8);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_steps, ended_mono_s) == 16);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_steps, wall_s) == 24);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_steps, data_s) == 32);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_steps, forward_s) == 40);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_steps, backward_s) == 48);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_steps, optimizer_s) == 56);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_steps, checkpoint_s) == 64);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_steps, waiting_s) == 72);
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_collectives) == 104);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_collectives, sequence) == 0);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_collectives, seq) == 8);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_collectives, bytes_moved) == 16);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_collectives, enqueued_mono_ns) == 24);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_collectives, started_mono_ns) == 32);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_collectives, ended_mono_ns) == 40);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_collectives, communicator) == 48);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_collectives, function) == 72);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_collectives, passage) == 100);
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_passages) == 8);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_passages, word) == 0);
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_phases) == 32);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_phases, name) == 0);
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_efforts) == 40);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_efforts, sequence) == 0);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_efforts, gc_s) == 8);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_efforts, cpu_s) == 16);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_efforts, loss) == 24);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_efforts, has_loss) == 32);
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_profiler) == 512);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, abi) == 0);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, inits) == 8);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, mask) == 16);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, level) == 24);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, budget_ppm) == 32);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, share_ppm) == 40);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, judged_mono_ns) == 48);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, opened_mono_ns) == 56);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, nccl_next) == 64);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, communicators_next) == 72);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, dropped_late) == 80);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, dropped_busy) == 88);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, dropped_no_box) == 96);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, dropped_no_context) == 104);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, unsampled) == 112);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, chain_lost) == 120);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, events) == 128);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, own_ns) == 136);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, chained) == 144);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, contexts_open) == 152);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, has_complaint) == 160);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, complaint) == 168);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, untimed) == 424);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_profiler, timed_one_in) == 432);
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_communicators) == 128);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_communicators, sequence) == 0);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_communicators, id) == 8);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_communicators, opened_mono_ns) == 16);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_communicators, closed_mono_ns) == 24);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_communicators, nranks) == 32);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_communicators, rank) == 36);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_communicators, nnodes) == 40);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_communicators, reserved) == 44);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_communicators, name) == 48);
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_nccl) == 120);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_nccl, sequence) == 0);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_nccl, seq) == 8);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_nccl, bytes_moved) == 16);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_nccl, enqueued_mono_ns) == 24);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_nccl, gpu_started_mono_ns) == 32);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_nccl, gpu_ended_mono_ns) == 40);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_nccl, gpu_clock_ns) == 48);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_nccl, communicator) == 56);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_nccl, step) == 64);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_nccl, started_channels) == 72);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_nccl, ended_channels) == 80);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_nccl, function) == 88);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_nccl, datatype) == 92);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_nccl, algorithm) == 96);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_nccl, protocol) == 100);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_nccl, channels) == 104);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_nccl, peer) == 108);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_nccl, root) == 112);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_nccl, flags) == 116);
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_mesh) == 32);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_mesh, sequence) == 0);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_mesh, tp) == 8);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_mesh, pp) == 12);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_mesh, dp) == 16);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_mesh, ep) == 20);
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_gpu_steps) == 72);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_gpu_steps, sequence) == 0);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_gpu_steps, number) == 8);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_gpu_steps, step) == 16);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_gpu_steps, wall_s) == 24);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_gpu_steps, data_s) == 32);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_gpu_steps, forward_s) == 40);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_gpu_steps, backward_s) == 48);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_gpu_steps, optimizer_s) == 56);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_gpu_steps, checkpoint_s) == 64);
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_gpu_phases) == 56);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_gpu_phases, sequence) == 0);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_gpu_phases, number) == 8);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_gpu_phases, gpu_s) == 16);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_gpu_phases, phase) == 24);
MEGASCALE_BOX_ASSERT(sizeof(struct megascale_box_restores) == 80);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_restores, sequence) == 0);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_restores, step) == 8);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_restores, restore_s) == 16);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_restores, read_bytes) == 24);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_restores, passed_over) == 32);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_restores, failed) == 40);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_restores, node) == 48);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_restores, buddy) == 56);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_restores, shared) == 64);
MEGASCALE_BOX_ASSERT(offsetof(struct megascale_box_restores, store) == 72);
#undef MEGASCALE_BOX_ASSERT

#endif
