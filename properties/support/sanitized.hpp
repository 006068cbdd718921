// Whether a sanitizer is in this program: it keeps what is freed for a while, so that bounds on
// memory mean nothing there. gcc has names for it, clang a question.
#pragma once

#ifndef __has_feature
#define __has_feature(feature) 0  // gcc
#endif

namespace lockstep::testing_support {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || \
    __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

}  // namespace lockstep::testing_support
