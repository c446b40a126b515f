#ifndef @UPPER@_H
#define @UPPER@_H

#include <limits.h>
#include <stdint.h>

#if INT_MAX < 2147483647 || (-1 >> 1) != -1
#error "int must have 32 bits, and >> must keep the sign."
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define @UPPER@_@KIND@ @INPUTS@
#define @UPPER@_OUTPUTS @OUTPUTS@
#define @UPPER@_STATE_BYTES @STATE@ /* sizeof(@PREFIX@_state) if int has 4 bytes@POINTER@ */
#define @UPPER@_WEIGHT_BYTES @BYTES@
#define @UPPER@_STACK_BYTES @STACK@ /* arrays of a step, without call frames */
@NAMES@
/* The state of one stream, and the memory of a step. */
typedef struct {
@MEMBERS@
} @PREFIX@_state;

/* Starts or restarts a stream.@WEIGHTS@ */
@RESET@;

/* Reads one time step x and writes the outputs y; x and y must not overlap. */
@STEP@;
@MORE@
#ifdef __cplusplus
}
#endif

#endif
