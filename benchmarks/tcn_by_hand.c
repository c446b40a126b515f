/* The TCN of tcn_adding as one writes it by hand for this net alone, to compare generated C with:
   8 blocks of two convolutions with 8 taps, 24 filters and dilations 1, 2, 4, ..., random weights.
   Prints the microseconds of a step. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BLOCKS = 8, TAPS = 8, INPUTS = 2, FILTERS = 24, LONGEST = (TAPS - 1) * 128 + 1 };

typedef struct {
    int channels, dilation, rows, head;
    _Alignas(64) float kernel[TAPS * FILTERS * FILTERS], bias[FILTERS], ring[LONGEST * FILTERS];
} Convolution;

static Convolution convolutions[BLOCKS][2];
static float shortcut[INPUTS * FILTERS];

static void fill(float *values, int count)
{
    for (int i = 0; i < count; i++)
        values[i] = 0.1f * ((float)rand() / (float)RAND_MAX - 0.5f);
}

static inline void multiply(const float *restrict x, const float *restrict kernel, int channels,
                            float *restrict sums)
{
    for (int i = 0; i < channels; i++)
        for (int o = 0; o < FILTERS; o++)
            sums[o] += x[i] * kernel[i * FILTERS + o];
}

static void convolve(Convolution *c, const float *x, float *y)
{
    memcpy(c->ring + c->head * c->channels, x, (size_t)c->channels * sizeof *x);
    float sums[FILTERS]; /* not y: compilers keep an array of the function in registers */
    memcpy(sums, c->bias, sizeof sums);
    for (int tap = 0; tap < TAPS; tap++) {
        int row = c->head - (TAPS - 1 - tap) * c->dilation;
        if (row < 0)
            row += c->rows;
        multiply(c->ring + row * c->channels, c->kernel + tap * c->channels * FILTERS,
                 c->channels, sums);
    }
    c->head = c->head + 1 == c->rows ? 0 : c->head + 1;
    for (int o = 0; o < FILTERS; o++)
        y[o] = sums[o] > 0 ? sums[o] : 0;
}

static void step(const float *x, float *y)
{
    float inputs[FILTERS], inner[FILTERS], branch[FILTERS];
    for (int b = 0; b < BLOCKS; b++) {
        convolve(&convolutions[b][0], b ? y : x, inner);
        convolve(&convolutions[b][1], inner, branch);
        if (b) {
            memcpy(inputs, y, sizeof inputs);
        } else {
            memset(inputs, 0, sizeof inputs);
            multiply(x, shortcut, INPUTS, inputs);
        }
        for (int o = 0; o < FILTERS; o++)
            y[o] = inputs[o] + branch[o] > 0 ? inputs[o] + branch[o] : 0;
    }
}

int main(int count, char **arguments)
{
    int steps = count > 1 ? atoi(arguments[1]) : 20000;
    float x[INPUTS] = {0.3f, 1}, y[FILTERS];
    struct timespec first, last;
    for (int b = 0; b < BLOCKS; b++) {
        for (int n = 0; n < 2; n++) {
            Convolution *c = &convolutions[b][n];
            c->channels = b || n ? FILTERS : INPUTS;
            c->dilation = 1 << b;
            c->rows = (TAPS - 1) * c->dilation + 1;
            fill(c->kernel, TAPS * c->channels * FILTERS);
            fill(c->bias, FILTERS);
        }
    }
    fill(shortcut, INPUTS * FILTERS);
    for (int t = 0; t < steps / 10; t++)
        step(x, y);
    clock_gettime(CLOCK_MONOTONIC, &first);
    for (int t = 0; t < steps; t++) {
        x[0] = (float)t / (float)steps;
        step(x, y);
    }
    clock_gettime(CLOCK_MONOTONIC, &last);
    double seconds = (double)(last.tv_sec - first.tv_sec) + 1e-9 * (double)(last.tv_nsec - first.tv_nsec);
    printf("%g %g\n", 1e6 * seconds / steps, (double)y[0]);
    return 0;
}
