/* What WebAssembly exports: an instance holds one stream, with the state, x and y in its memory. */
#include "model.h"

static model_state instance;
static @REAL@ y[MODEL_OUTPUTS];

@REAL@ *outputs(void) { return y; }
void reset(void) { model_reset(&instance); }
#ifdef MODEL_TOKENS
void step(int token) { model_step(&instance, token, y); }
#else
static @REAL@ x[MODEL_INPUTS];
@REAL@ *inputs(void) { return x; }
void step(void) { model_step(&instance, x, y); }
#endif
