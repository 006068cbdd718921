// Which PyTorch this library was compiled for, as text in its data: lockstep.ops reads it from the
// file before it loads the library, since loading one for another version fails without a reason
// that a user could read.
#include <torch/version.h>

extern "C" {
extern const char lockstep_torch_built_for[];
// `used`: nothing in the library refers to it.
__attribute__((used)) const char lockstep_torch_built_for[] =
    "liblockstep_torch.so is built for PyTorch " TORCH_VERSION;
}
