// A law that the reference keeps and a planted bug breaks. Bugs are wrong ways of calling the
// references, or wrong copies of a few of their lines; the references have no hooks.
#pragma once

#include <gtest/gtest.h>

namespace lockstep::testing_support {

/// `law(operation)` says whether the operation keeps it.
template <class Law, class Right, class Wrong>
void catches(Law law, Right right, Wrong wrong) {
  EXPECT_TRUE(law(right)) << "the reference keeps the law";
  EXPECT_FALSE(law(wrong)) << "the planted bug breaks it";
}

}  // namespace lockstep::testing_support
