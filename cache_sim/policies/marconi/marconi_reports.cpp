// The project whose bug reports traces of this family cite.
#include "cache_sim/trace/public_reports.hpp"

namespace lockstep::cache_sim {
namespace {

const Registration<PublicProject> kProject{{"marconi"}};

}  // namespace
}  // namespace lockstep::cache_sim
