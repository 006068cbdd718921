#include "reference/compiled/functions.hpp"

namespace lockstep {

LOCKSTEP_RECURRENT_FUNCTIONS(LOCKSTEP_COMPILED, float)
LOCKSTEP_RECURRENT_FUNCTIONS(LOCKSTEP_COMPILED, double)

}  // namespace lockstep
