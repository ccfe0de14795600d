/* What every kernel here is to its caller: a function over a record of arguments, run by every thread of a
 * team. A tape is a list of such calls; a lone op is a tape of one. Knows no kernel. */
#ifndef CONSTATE_TAPE_H
#define CONSTATE_TAPE_H

#include <stdint.h>

/* Runs the share of thread `thread` of `threads`. How the work is cut may depend on `threads`; what any one
 * number is computed from may not, so that results do not depend on how many threads there are. */
typedef void (*Kernel)(const void *args, int thread, int threads);

typedef struct {
    Kernel kernel;
    const void *args;
    int64_t apart; /* the next entry reads and writes nothing of this one's */
} Entry;

/* Each thread walks the whole tape; all have finished an entry before any begins the next, unless it is
 * `apart` from that. */
void constate_run(const Entry *tape, int64_t count, int threads);

#endif
