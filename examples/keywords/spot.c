/* Reads sound from its input, 16-bit samples, and says the words as they are heard. */
#include "settings.h"
#include "spotter.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>

static const char *const words[] = {WORDS};
static spotter_state state;

int main(void)
{
    int16_t samples[SPOTTER_INPUTS];
    float x[SPOTTER_INPUTS], y[SPOTTER_OUTPUTS];
    int pause = 0;
    double seconds = 0;
    clock_t start = clock();
    spotter_reset(&state);
    while (fread(samples, sizeof samples, 1, stdin) == 1) {
        int best = 1; /* 0: none of the words */
        for (int k = 0; k < SPOTTER_INPUTS; k++)
            x[k] = samples[k] / 32768.0f;
        spotter_step(&state, x, y);
        seconds += (double)SPOTTER_INPUTS / RATE;
        if (isnan(y[0]) || pause-- > 0) /* between two frames, or the same word */
            continue;
        for (int k = 2; k < SPOTTER_OUTPUTS; k++)
            best = y[k] > y[best] ? k : best;
        if (y[best] > THRESHOLD) {
            printf("%8.2f s  %s\n", seconds, words[best - 1]);
            fflush(stdout);
            pause = PAUSE;
        }
    }
    fprintf(stderr, "%.0f microseconds for a second of sound\n",
            1e6 * (double)(clock() - start) / CLOCKS_PER_SEC / seconds);
    return 0;
}
