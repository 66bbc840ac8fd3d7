/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's words as codes: the rows are those of blackbox.h, and a code is the place of its word. */

#include <strings.h>

#include "plugin.h"

#define ROW_LENGTH(row) (sizeof(row) / sizeof((row)[0]))

static const char *const functions[] = {MEGASCALE_NCCL_FUNCTIONS};
static const char *const datatypes[] = {MEGASCALE_NCCL_DATATYPES};
static const char *const algorithms[] = {MEGASCALE_NCCL_ALGORITHMS};
static const char *const protocols[] = {MEGASCALE_NCCL_PROTOCOLS};
static const uint8_t sizes[] = {MEGASCALE_NCCL_DATATYPE_BYTES};

_Static_assert(ROW_LENGTH(sizes) == ROW_LENGTH(datatypes), "a size for every datatype");

/* Case does not count: NCCL has spelled algorithms both ways. The words of a row begin with the same `common` letters. */
static uint32_t code(const char *word, const char *const *row, uint32_t length, uint32_t common) {
    if (word == NULL || strncasecmp(word, row[1], common) != 0) return 0;
    char first = word[common] | 32; /* a small letter */
    for (uint32_t at = 1; at < length; at++) {
        const char *rest = row[at] + common;
        if ((*rest | 32) == first && strcasecmp(word + common, rest) == 0) return at;
    }
    return 0;
}

uint32_t function_code(const char *word) { return code(word, functions, ROW_LENGTH(functions), 0); }
uint32_t datatype_code(const char *word) { return code(word, datatypes, ROW_LENGTH(datatypes), 4); }
uint32_t algorithm_code(const char *word) { return code(word, algorithms, ROW_LENGTH(algorithms), 0); }
uint32_t protocol_code(const char *word) { return code(word, protocols, ROW_LENGTH(protocols), 0); }

/* What is not known counts as one byte: unsigned bytes are what NCCL's own words leave out. */
uint64_t datatype_bytes(uint32_t code) { return code < ROW_LENGTH(sizes) ? sizes[code] : 1; }
