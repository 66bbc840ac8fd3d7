/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rank's black box, made by the recorder: found by MEGASCALE_BOX_DIR and RANK, and mapped once it is there.
 *
 * A slot is written by one thread at a time: whoever turns its sequence from even to odd. Who comes second tries for
 * about two microseconds and then goes without; nobody ever waits for a thread that does not run.
 */

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "plugin.h"

/* 12 tries, each waiting twice as long as the one before: 4 s in all. The box is made when the script imports torch, and
 * no communicator comes before that; a rank that has none by then records nothing (MEGASCALE_RECORDER=0). */
enum { MOST_TRIES = 12, FIRST_PAUSE_NS = 1000000, SPINS = 200 };

static profiler_page before_the_box;
profiler_page *megascale_page = &before_the_box;

static unsigned char *base; /* of the mapped box; NULL while there is none */
static int opening;
static uint32_t tries;
static int64_t next_try_ns;

/* A child shares the mapping, and is not the rank: it must not write. What it counts, it counts for itself. */
static void leave_in_child(void) {
    STORE_RELEASE(&base, NULL);
    STORE_RELEASE(&megascale_page, &before_the_box);
    STORE(&tries, MOST_TRIES);
}

static unsigned char *map_box(const char *path) {
    int file = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (file < 0) return NULL;
    unsigned char *mapped = NULL;
    struct stat found;
    struct megascale_box_header header;
    bool ours = fstat(file, &found) == 0 && S_ISREG(found.st_mode) && found.st_size >= MEGASCALE_BOX_FILE_BYTES &&
                pread(file, &header, sizeof header, 0) == (ssize_t)sizeof header &&
                memcmp(header.magic, MEGASCALE_BOX_MAGIC, sizeof header.magic) == 0 &&
                header.version >= MEGASCALE_BOX_VERSION && /* later versions only add */
                header.pid == (int64_t)getpid();           /* else it is of the round before */
    if (ours) {
        void *place = mmap(NULL, MEGASCALE_BOX_FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        mapped = place == MAP_FAILED ? NULL : place;
    }
    close(file);
    return mapped;
}

/* Take over what was said and counted before the box was there. */
static void move_in(unsigned char *mapped, int64_t now_ns) {
    profiler_page *page = (profiler_page *)(mapped + MEGASCALE_BOX_PROFILER_OFFSET);
    STORE(&page->opened_mono_ns, now_ns);
    STORE(&page->budget_ppm, LOAD(&before_the_box.budget_ppm));
    STORE(&page->abi, LOAD(&before_the_box.abi));
    STORE(&page->inits, LOAD(&before_the_box.inits));
    STORE(&page->mask, LOAD(&before_the_box.mask));
    STORE(&page->level, LOAD(&before_the_box.level));
    STORE(&page->timed_one_in, LOAD(&before_the_box.timed_one_in));
    STORE(&page->contexts_open, LOAD(&before_the_box.contexts_open));
    STORE(&page->chained, LOAD(&before_the_box.chained));
    __atomic_fetch_add(&page->dropped_no_box, LOAD(&before_the_box.dropped_no_box), __ATOMIC_RELAXED);
    __atomic_fetch_add(&page->events, LOAD(&before_the_box.events), __ATOMIC_RELAXED);
    if (LOAD_ACQUIRE(&before_the_box.has_complaint) && !LOAD(&page->has_complaint)) {
        memcpy(page->complaint, before_the_box.complaint, sizeof page->complaint);
        STORE_RELEASE(&page->has_complaint, 1);
    }
    STORE_RELEASE(&megascale_page, page);
    STORE_RELEASE(&base, mapped);
}

bool box_is_open(void) { return LOAD_ACQUIRE(&base) != NULL; }

bool box_given_up(void) { return !box_is_open() && LOAD(&tries) >= MOST_TRIES; }

/* Map the box if it is there; with now_ns = 0 at once, else only when it is time for another try. */
bool box_open(int64_t now_ns) {
    if (box_is_open()) return true;
    if (now_ns && (now_ns < LOAD(&next_try_ns) || LOAD(&tries) >= MOST_TRIES)) return false;
    if (__atomic_exchange_n(&opening, 1, __ATOMIC_ACQUIRE)) return box_is_open();
    if (!box_is_open()) {
        const char *folder = getenv("MEGASCALE_BOX_DIR"), *rank = getenv("RANK");
        if (rank == NULL || !*rank) rank = getenv("MEGASCALE_RANK"); /* another launcher's rank, once it is known */
        char path[4096];
        unsigned char *mapped = NULL;
        if (folder == NULL || rank == NULL || !*folder || !*rank) {
            STORE(&tries, MOST_TRIES);
        } else if (snprintf(path, sizeof path, "%s/%s.box", folder, rank) < (int)sizeof path) {
            mapped = map_box(path);
        }
        static bool child_is_told;
        if (mapped != NULL) {
            if (!child_is_told) child_is_told = pthread_atfork(NULL, NULL, leave_in_child) == 0;
            move_in(mapped, mono_ns());
        } else {
            uint32_t tried = LOAD(&tries);
            STORE(&next_try_ns, mono_ns() + ((int64_t)FIRST_PAUSE_NS << tried));
            if (tried < MOST_TRIES) STORE(&tries, tried + 1);
        }
    }
    __atomic_store_n(&opening, 0, __ATOMIC_RELEASE);
    return box_is_open();
}

nccl_slot *box_nccl(uint64_t number) {
    unsigned char *box = LOAD_ACQUIRE(&base);
    return box ? (nccl_slot *)(box + MEGASCALE_BOX_NCCL_OFFSET) + number % MEGASCALE_BOX_NCCL_SLOTS : NULL;
}

communicator_slot *box_communicator(uint64_t number) {
    unsigned char *box = LOAD_ACQUIRE(&base);
    if (box == NULL) return NULL;
    return (communicator_slot *)(box + MEGASCALE_BOX_COMMUNICATORS_OFFSET) + number % MEGASCALE_BOX_COMMUNICATORS_SLOTS;
}

/* The last finished step as Python has written it; -1 before the first. Its four slots are four loads. */
int64_t box_step(void) {
    unsigned char *box = LOAD_ACQUIRE(&base);
    if (box == NULL) return -1;
    struct megascale_box_now *now = (struct megascale_box_now *)(box + MEGASCALE_BOX_NOW_OFFSET);
    struct megascale_box_now *newest = now;
    uint64_t best = 0;
    for (unsigned at = 0; at < MEGASCALE_BOX_NOW_SLOTS; at++) {
        uint64_t sequence = LOAD_ACQUIRE(&now[at].sequence);
        if (sequence % 2 == 0 && sequence > best) best = sequence, newest = &now[at];
    }
    int64_t step = LOAD_ACQUIRE(&newest->step);
    return best && LOAD(&newest->sequence) == best ? step : -1;
}

/* Say once, in the box and on stderr, what the user should know. */
void box_complain(const char *sentence, const char *detail) {
    static int said;
    if (__atomic_exchange_n(&said, 1, __ATOMIC_ACQ_REL)) return;
    profiler_page *page = LOAD_ACQUIRE(&megascale_page);
    snprintf(page->complaint, sizeof page->complaint, "%s%s", sentence, detail ? detail : "");
    STORE_RELEASE(&page->has_complaint, 1);
    dprintf(STDERR_FILENO, "megascale-ops NCCL profiler: %s%s\n", sentence, detail ? detail : "");
}

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#define NUMBER_MASK ((UINT64_C(1) << MEGASCALE_BOX_NUMBER_BITS) - 1)

/* What follows must not become visible before the odd number that was just stored. */
static inline void fields_follow(void) {
#if !defined(__SANITIZE_THREAD__) /* which knows no fences; on x86-64 the exchange is one already */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

/* Take a slot for a new record; GONE when a newer one is in it. */
enum taking slot_claim(uint64_t *sequence, uint64_t number) {
    for (int spin = 0; spin < SPINS; spin++) {
        uint64_t found = LOAD(sequence);
        if ((found & NUMBER_MASK) > 2 * number + 1) return GONE;
        if (found % 2 == 0 && __atomic_compare_exchange_n(sequence, &found, 2 * number + 1, false, __ATOMIC_ACQUIRE,
                                                          __ATOMIC_RELAXED)) {
            fields_follow();
            return TAKEN;
        }
        pause_briefly();
    }
    return BUSY;
}

/* Take a slot to write its record again; GONE when another is in it by now. */
enum taking slot_reopen(uint64_t *sequence, uint64_t number) {
    for (int spin = 0; spin < SPINS; spin++) {
        uint64_t found = LOAD(sequence);
        if (((found - 1) & NUMBER_MASK) / 2 != number) return GONE;
        uint64_t again = ((found >> MEGASCALE_BOX_NUMBER_BITS) + 1) << MEGASCALE_BOX_NUMBER_BITS | (2 * number + 1);
        if (found % 2 == 0 &&
            __atomic_compare_exchange_n(sequence, &found, again, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
            fields_follow();
            return TAKEN;
        }
        pause_briefly();
    }
    return BUSY;
}

/* The record is whole. */
void slot_close(uint64_t *sequence) { STORE_RELEASE(sequence, LOAD(sequence) + 1); }

bool slot_holds(const uint64_t *sequence, uint64_t number) {
    return ((LOAD_ACQUIRE(sequence) - 1) & NUMBER_MASK) / 2 == number;
}
