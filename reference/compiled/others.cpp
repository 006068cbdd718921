#include "reference/compiled/functions.hpp"

namespace lockstep {

LOCKSTEP_OTHER_FUNCTIONS(LOCKSTEP_COMPILED, float)
LOCKSTEP_OTHER_FUNCTIONS(LOCKSTEP_COMPILED, double)

}  // namespace lockstep
