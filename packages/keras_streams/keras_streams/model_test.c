/* Compares @PREFIX@ with Keras: cc @PREFIX@.c @PREFIX@_test.c -lm && ./a.out */
#include "@PREFIX@.h"

#include <math.h>
#include <stdio.h>

@X@
@EXPECTED@
@LARGEST@
int main(void)
{
    static @PREFIX@_state state;
    @REAL@ y[@UPPER@_OUTPUTS], difference = 0;
    @RESET@
    for (int t = 0; t < @STEPS@; t++) {
        @PREFIX@_step(&state, @READ@, y);
        for (int k = 0; k < @UPPER@_OUTPUTS; k++) {
            @REAL@ wanted = expected[t * @UPPER@_OUTPUTS + k];
            if ((wanted != wanted) != (y[k] != y[k]))
                difference = INFINITY;
            else if (fabs@F@(y[k] - wanted) / largest[k] > difference)
                difference = fabs@F@(y[k] - wanted) / largest[k];
        }
    }
    printf("largest difference from Keras: %.1e of the largest value of the same output\n",
           (double)difference);
    return difference <= @TOLERANCE@ ? 0 : 1;
}
