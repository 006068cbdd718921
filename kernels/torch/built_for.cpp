// The PyTorch version that this library was compiled for, as text in its data. lockstep.ops reads
// it from the file before it loads the library, because loading a library for another version fails
// without a message that a user could understand.
#include <torch/version.h>

extern "C" {
extern const char lockstep_torch_built_for[];
// `used` keeps the text, to which nothing in the library refers.
__attribute__((used)) const char lockstep_torch_built_for[] =
    "liblockstep_torch.so is built for PyTorch " TORCH_VERSION;
}
