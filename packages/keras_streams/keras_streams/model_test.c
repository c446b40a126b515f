/* Compares @PREFIX@ with Keras: cc @PREFIX@.c @PREFIX@_test.c -lm && ./a.out */
#include "@PREFIX@.h"

#include <math.h>
#include <stdio.h>

@X@
@EXPECTED@
int main(void)
{
    static @PREFIX@_state state;
    @REAL@ y[@UPPER@_OUTPUTS], largest = 0, difference = 0;
    @RESET@
    for (int t = 0; t < @STEPS@; t++) {
        @PREFIX@_step(&state, @READ@, y);
        for (int k = 0; k < @UPPER@_OUTPUTS; k++) {
            @REAL@ wanted = expected[t * @UPPER@_OUTPUTS + k];
            largest = fabs@F@(wanted) > largest ? fabs@F@(wanted) : largest;
            if ((wanted != wanted) != (y[k] != y[k]))
                difference = INFINITY;
            else if (fabs@F@(y[k] - wanted) > difference)
                difference = fabs@F@(y[k] - wanted);
        }
    }
    difference /= largest > 0 ? largest : 1;
    printf("largest difference from Keras: %.1e of the largest output\n", (double)difference);
    return difference <= @TOLERANCE@ ? 0 : 1;
}
