/* Walks a tape with a team of threads. One parallel region for the whole tape: starting a region costs more
 * than most entries of a decode step, a barrier inside one about a microsecond. */
#include "tape.h"

#ifdef _OPENMP
#include <omp.h>
#endif

void constate_run(const Entry *tape, int64_t count, int threads) {
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        {
            int thread = omp_get_thread_num(), team = omp_get_num_threads();
            for (int64_t i = 0; i < count; i++) {
                tape[i].kernel(tape[i].args, thread, team);
                if (!tape[i].apart) {
#pragma omp barrier
                }
            }
        }
        return;
    }
#endif
    for (int64_t i = 0; i < count; i++) tape[i].kernel(tape[i].args, 0, 1);
}
