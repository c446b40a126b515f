/* Floating-point conversions */

void @PREFIX@_dequantize(const int16_t *q, float *y)
{
    for (int k = 0; k < @UPPER@_OUTPUTS; k++)
        y[k] = q[k] == INT16_MIN ? NAN : ldexpf(q[k], -(@BITS@));
}
#ifndef @UPPER@_TOKENS

@TABLES@
void @PREFIX@_quantize(const float *x, int16_t *q)
{
    static const int bits[] = {@INPUT@};
@MAPS@
    for (int k = 0; k < @UPPER@_INPUTS; k++) {
        float scaled = rintf(ldexpf(y[k], bits[k]));
        q[k] = (int16_t)(scaled > -32767 ? scaled < 32767 ? scaled : 32767 : -32767); /* or NaN */
    }
}
#endif
