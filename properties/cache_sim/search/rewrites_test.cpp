// The forms that take the place of a trace: each has a trace that has it, and one that has not.
#include "cache_sim/search/rewrites.hpp"

#include <gtest/gtest.h>

#include <string>

#include "properties/support/search.hpp"

namespace lockstep::cache_sim {
namespace {

using testing_support::form_of, testing_support::text_of;

bool has_shorter_form(const std::string& trace, const std::string& wanted) {
  return take_shorter_form(form_of(trace),
                           [&](const TraceForm& form) { return text_of(form) == wanted; });
}

bool has_distant_form(const std::string& trace, const std::string& wanted,
                      const FieldValues& values = {}) {
  return take_distant_form(form_of(trace), values,
                           [&](const TraceForm& form) { return text_of(form) == wanted; });
}

/// A trace of so many lines, each another one.
std::string lines(int count) {
  std::string text;
  for (int i = 1; i <= count; ++i) text += "match tokens=a" + std::to_string(i) + "\n";
  return text;
}

TEST(Rewrites, flushTakesThePlaceOfARun) {
  EXPECT_TRUE(has_shorter_form(
      lines(1) + "land tier=host\nsettle\nland tier=disk\nsettle\nevict kv=1\n" + lines(2),
      lines(1) + "flush\n" + lines(2)));
  EXPECT_FALSE(
      has_shorter_form(lines(1) + "land tier=host\n" + lines(6), lines(1) + "flush\n" + lines(6)))
      << "one line for one line is no shorter";
}

TEST(Rewrites, twoLinesGoTogetherWhateverStandsBetween) {
  EXPECT_TRUE(has_shorter_form("lock as=l1 tokens=a1\n" + lines(5) + "unlock lock=l1\n", lines(5)));
  EXPECT_FALSE(has_shorter_form(
      "lock as=l1 tokens=a1\n" + lines(2) + "check\n" + lines(2) + "unlock lock=l1\n",
      lines(2) + lines(2)))
      << "three lines are not two";
}

TEST(Rewrites, aSlotStoresWhatARequestOfMoreThanThreeLinesStored) {
  const std::string request =
      "config disk=1 host_kv=9 host_states=1\nadmit id=r1 tokens=a4\nsettle\n"
      "admit id=r1 tokens=a4\nextend id=r1 n=4\n"
      "finish id=r1\n";
  const std::string slot = "settle\nalloc as=r1 tokens=a4\ninsert slot=r1 tokens=a4\n";
  EXPECT_TRUE(has_shorter_form(request + lines(2), slot + lines(2)));
  const std::string two = "admit id=r1 tokens=a4\ncheckpoint id=r1\n";
  EXPECT_FALSE(has_shorter_form(two + lines(5), slot.substr(7) + lines(5)));
}

// The key ends where the computed tokens do.
TEST(Rewrites, aSlotStoresNoTokensThatWereNotComputed) {
  TraceForm form = form_of(
      "admit id=r1 tokens=a9\nextend id=r1 n=2\nextend id=r1 n=2\ncheckpoint id=r1\n" + lines(3));
  form.steps[1].rest = 7;
  form.steps[2].rest = 5;
  EXPECT_TRUE(take_shorter_form(form, [](const TraceForm& now) {
    return text_of(now).starts_with("alloc as=r1 tokens=a4\n");
  }));
}

TEST(Rewrites, aForkBecomesAnAlloc) {
  const std::string after = "advance slot=s2 tokens=a1\ninsert slot=s2 tokens=a1\n" + lines(3);
  EXPECT_TRUE(
      has_shorter_form("alloc as=s1\nfork as=s2 slot=s1\n" + after, "alloc as=s2\n" + after));
  EXPECT_FALSE(
      has_shorter_form("alloc as=s1\ncopy from=s1 to=s2\n" + after, "alloc as=s2\n" + after));
}

TEST(Rewrites, aLineGoesWhereAnotherOneMovesBesideItsTwin) {
  const std::string begin = lines(10) + "land tier=host\nsettle\nland tier=disk\n";
  EXPECT_TRUE(has_distant_form(
      begin + "admit id=r1 tokens=a4\nsettle\nevict kv=1\n",
      lines(10) + "land tier=host\nadmit id=r1 tokens=a4\nsettle\nland tier=disk\nevict kv=1\n"));
  EXPECT_FALSE(has_distant_form(
      begin + "admit id=r1 tokens=a4\ncheck\nevict kv=1\n",
      lines(10) + "land tier=host\nadmit id=r1 tokens=a4\nsettle\nland tier=disk\nevict kv=1\n"))
      << "a check does no settle's work";
}

TEST(Rewrites, linesGoTogetherWithAValueOfAField) {
  const std::string trace = "config page=4\n" + lines(4) + "flush\ncheck\nflush\n" + lines(9);
  const auto drops_both = [&](const FieldValues& values) {
    return take_distant_form(form_of(trace), values, [&](const TraceForm& form) {
      return form.config.page == 1 && text_of(form) == lines(4) + lines(9);
    });
  };
  EXPECT_TRUE(drops_both({{"page", "1"}}));
  EXPECT_FALSE(drops_both({{"max_running", "1"}}));
}

// A trace that is read at a glance costs no execution, one of a dozen lines not the cube.
TEST(Rewrites, areNotTriedOnShortTraces) {
  int tried = 0;
  const TakesForm counts = [&](const TraceForm&) {
    ++tried;
    return false;
  };
  EXPECT_FALSE(take_shorter_form(form_of(lines(kShortTrace)), counts));
  EXPECT_FALSE(take_distant_form(form_of(lines(kLongTrace)), {{"page", "4"}}, counts));
  EXPECT_EQ(tried, 0);
  EXPECT_FALSE(take_shorter_form(form_of(lines(kLongTrace)), counts));
  EXPECT_GT(tried, 0);
  EXPECT_LE(tried, static_cast<int>(kLongTrace * kLongTrace));
}

// Lines that stand for requests of a scheduler, and answers, are not rewritten: lines only go.
TEST(Rewrites, leaveRequestsAndAnswersAsTheyAre) {
  const std::string answered = "check\n----\nkv_free=1\n";
  for (const std::string& trace :
       {"request id=r1 tokens=a4 output=1\n" + lines(0) +
            "request id=r2 tokens=a4 output=1\nrequest id=r3 tokens=a4 output=1\n"
            "evict kv=1\nevict kv=2\nevict kv=3\nrun\n",
        lines(7) + answered})
    EXPECT_FALSE(take_shorter_form(form_of(trace), [](const TraceForm& form) {
      return text_of(form).find("flush") != std::string::npos;
    })) << trace;
}

}  // namespace
}  // namespace lockstep::cache_sim
