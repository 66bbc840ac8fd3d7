/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The level of the ladder that holds now, for all threads: the budget's, or the one at which a measurement holds us.
 *
 * Below budget.c, mask.c and thinning.c, which all go by it.
 */

#include "plugin.h"

static uint32_t level;    /* the budget's */
static int32_t held = -1; /* a level at which a measurement holds us, or -1 */

void level_set(unsigned now) { STORE(&level, now); }
void level_hold(int at) { STORE(&held, at); }
bool is_held(void) { return LOAD(&held) >= 0; }
unsigned level_now(void) { return is_held() ? (unsigned)LOAD(&held) : LOAD(&level); }

/* Pure: which of the events that we could have are wanted at this level. */
__attribute__((visibility("default"))) int megascale_profiler_wanted(int base, uint32_t at) {
    if (at >= LEVEL_NO_CHANNELS) base &= ~EVENT_KERNEL_CH;
    if (at >= LEVEL_NO_P2P) base &= ~EVENT_P2P;
    return base;
}
