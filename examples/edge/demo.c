/* Reads samples of a watch (6 floats each) and says which exercise somebody does. */
#include "exercises.h"

#include <stdio.h>

static const char *const names[EXERCISES_OUTPUTS] = {EXERCISES_NAMES};
static exercises_state state;

int main(void)
{
    float x[EXERCISES_INPUTS], y[EXERCISES_OUTPUTS];
    int shown = -1;
    exercises_reset(&state);
    for (int t = 0; fread(x, sizeof x, 1, stdin) == 1; t++) {
        int best = 0;
        exercises_step(&state, x, y);
        for (int k = 1; k < EXERCISES_OUTPUTS; k++)
            best = y[k] > y[best] ? k : best;
        if (best != shown && y[best] > 0.9f) {
            printf("%6.1f s  %s\n", t / 12.5, names[best]);
            shown = best;
        }
    }
    return 0;
}
