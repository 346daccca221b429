// What a model does most, on CPUs. Plain C, called from Python by address.
//
// Every output row is computed in one order whatever the other rows are: a token's result does not depend on
// the batch. Numbers are rounded to the model's type where its own modules round them. Sizes are in elements;
// what they must be multiples of is checked by the caller (kernels.py).

#include "decoder.h"
#include "draw.h"
#include "eagle.h"
#include "experts.h"
#include "state_scans.h"
