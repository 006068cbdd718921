// Basics: random numbers as a pure function of their seed, assertions that throw sentences,
// registries and interned names.
#include <gtest/gtest.h>

#include <string>

#include "reference/base/counted.hpp"
#include "reference/base/finding.hpp"
#include "reference/base/ids.hpp"
#include "reference/base/mark.hpp"
#include "reference/base/mix.hpp"
#include "reference/base/philox.hpp"
#include "reference/base/registry.hpp"
#include "reference/base/require.hpp"
#include "reference/base/result.hpp"
#include "reference/protocol/defect.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep {
namespace {

// The known answers of Random123's kat_vectors: the same numbers on every machine, for ever.
TEST(Philox, givesTheKnownAnswers) {
  EXPECT_EQ(philox4x32_10({0, 0, 0, 0}, {0, 0}),
            (PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr std::uint32_t ones = 0xffffffff;
  EXPECT_EQ(philox4x32_10({ones, ones, ones, ones}, {ones, ones}),
            (PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(
      philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
      (PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// Every bit of seed, stream and index counts: two streams never are one.
TEST(Philox, eachArgumentHasItsPlaceInTheBlock) {
  EXPECT_EQ(random_bits(0, 0, 0), 0xe169c58d'6627e8d5u);
  EXPECT_EQ(random_bits(0x299f31d0'a4093822u, 0x03707344'13198a2eu, 0x85a308d3'243f6a88u),
            0x94fdcceb'd16cfe09u);
  const std::uint64_t zero = random_bits(0, 0, 0);
  for (int bit = 0; bit < 64; ++bit) {
    const std::uint64_t x = std::uint64_t{1} << bit;
    EXPECT_NE(random_bits(x, 0, 0), zero);
    EXPECT_NE(random_bits(0, x, 0), zero);
    EXPECT_NE(random_bits(0, 0, x), zero);
  }
}

TEST(Philox, belowABoundIsEachNumberAboutAsOften) {
  int count[7] = {};
  for (std::uint64_t i = 0; i < 7000; ++i) ++count[random_below(7, 1, 2, i)];
  for (const int n : count) EXPECT_NEAR(n, 1000, 150);
  EXPECT_EQ(random_below(1, 5, 6, 7), 0u);
}

TEST(Counted, oneItemIsSingular) {
  EXPECT_EQ(counted(1, "token"), "1 token");
  EXPECT_EQ(counted(std::size_t{0}, "token"), "0 tokens");
  EXPECT_EQ(counted(-1, "KV token"), "-1 KV tokens");
  EXPECT_EQ(counted(std::uint32_t{1}, "entry", "entries"), "1 entry");
  EXPECT_EQ(counted(2, "entry", "entries"), "2 entries");
  EXPECT_EQ(is_or_are(1), "is");
  EXPECT_EQ(is_or_are(0), "are");
}

TEST(Mix, givesTheKnownAnswer) {
  EXPECT_EQ(mix64(0), 0xe220a8397b1dcdafu);
  Digest one, other;
  one.add(1);
  one.add(2);
  other.add(2);
  other.add(1);
  EXPECT_NE(one.value, other.value) << "a digest is of a sequence, not of a set";
}

TEST(Require, throwsItsSentenceAndThePlace) {
  EXPECT_NO_THROW(require(true, "never seen"));
  try {
    require(false, "heads are a multiple of groups");
    FAIL() << "it did not throw";
  } catch (const ContractViolation& broken) {
    const std::string place = "(base_test.cpp:" + std::to_string(__LINE__ - 3) + ")";
    EXPECT_EQ(std::string(broken.what()), "heads are a multiple of groups " + place);
  }
}

struct TestEntry {
  std::string_view name;
  int value;
};

TEST(Registry, findsByNameInAnyOrderAndRefusesASecondOne) {
  const Registration<TestEntry> b{{"b", 2}}, a{{"a", 1}}, c{{"c", 3}};
  EXPECT_THROW((Registration<TestEntry>{{"a", 4}}), ContractViolation);
  ASSERT_NE(Registry<TestEntry>::find("a"), nullptr);
  EXPECT_EQ(Registry<TestEntry>::find("a")->value, 1);
  EXPECT_EQ(Registry<TestEntry>::find("d"), nullptr);
  std::string names;
  for (const TestEntry& entry : Registry<TestEntry>::all()) names += entry.name;
  EXPECT_EQ(names, "abc");
}

TEST(Registry, eachDefectNamesASubjectAndSaysWhatItDoes) {
  for (const DefectEntry& entry : Registry<DefectEntry>::all()) {
    EXPECT_NE(entry.name.find(':'), std::string_view::npos) << entry.name;
    EXPECT_FALSE(entry.sentence.empty()) << entry.name;
    EXPECT_EQ(Defect::find(entry.name), entry.defect);
  }
  EXPECT_EQ(Defect::find("radix:nothing"), nullptr);
}

TEST(Registry, onePolicyIsTheDefault) {
  EXPECT_EQ(default_policy(), "sglang-no-buffer");
}

// Rare paths are listed before they are ever taken, or nobody would miss them.
TEST(Marks, areListedBeforeTheyAreReached) {
  const auto find = [] { return Registry<MarkEntry>::find("a.path.of.this.test"); };
  ASSERT_NE(find(), nullptr);
  const std::uint64_t before = *find()->count;
  for (int i = 0; i < 3; ++i) LOCKSTEP_MARK("a.path.of.this.test");
  EXPECT_EQ(*find()->count, before + 3);
}

TEST(Names, equalTextsAreEqualIntegers) {
  const Name one = Name::intern("one of this test");
  EXPECT_EQ(one, Name::intern(std::string("one of ") + "this test"));
  EXPECT_NE(one, Name::intern("another of this test"));
  EXPECT_EQ(one.text(), "one of this test");
  EXPECT_TRUE(one.exists());
  EXPECT_FALSE(Name().exists());
  EXPECT_EQ(Name().text(), "");
  // Texts stay where they are while others are interned.
  const std::string* const text = &one.text();
  for (int i = 0; i < 3000; ++i) Name::intern("name " + std::to_string(i));
  EXPECT_EQ(text, &one.text());
  EXPECT_EQ(Name::intern("name 2999").text(), "name 2999");
}

TEST(Ids, noneNamesNothing) {
  EXPECT_FALSE(StateSlot::none().exists());
  EXPECT_TRUE(StateSlot{0}.exists());
  EXPECT_LT(StateSlot{1}, StateSlot{2});
  static_assert(!std::is_convertible_v<RequestRow, StateSlot>, "a row is no slot");
}

TEST(Findings, namesAreThoseOfTheContractAndBack) {
  for (int i = 0; i <= static_cast<int>(FindingKind::nondeterministic); ++i) {
    const auto kind = static_cast<FindingKind>(i);
    EXPECT_EQ(finding_kind_from(to_string(kind)), kind) << to_string(kind);
    EXPECT_TRUE(meaning(kind).ends_with(".")) << to_string(kind) << " says what it means";
  }
  EXPECT_FALSE(finding_kind_from("wrong_state_prefix"));
  EXPECT_FALSE(finding_kind_from(""));
  EXPECT_EQ(to_string(FindingKind::wrong_state_prefix), "wrong-state-prefix");
}

TEST(Findings, kindsDecideTheExitStatusOfTheContract) {
  for (const auto kind : {FindingKind::wrong_state_prefix, FindingKind::unaligned_state,
                          FindingKind::slot_in_two_places, FindingKind::leak,
                          FindingKind::size_accounting, FindingKind::out_of_range})
    EXPECT_EQ(exit_status(kind), 10) << to_string(kind);
  for (const auto kind :
       {FindingKind::cached_too_much, FindingKind::missed_reuse, FindingKind::output_differs,
        FindingKind::reply_differs, FindingKind::answer_differs, FindingKind::subject_died,
        FindingKind::subject_silent, FindingKind::subject_garbled})
    EXPECT_EQ(exit_status(kind), 11) << to_string(kind);
  EXPECT_EQ(exit_status(FindingKind::stuck), 12);
  EXPECT_EQ(exit_status(FindingKind::nondeterministic), 13);
}

TEST(Errors, carryTheirStatusAndPerhapsTheirKind) {
  const Result<int> bad = fail("a file is not there");
  EXPECT_EQ(bad.error().status, 2);
  EXPECT_FALSE(bad.error().finding);
  const Result<int> died = fail_as(FindingKind::subject_died, "it died");
  EXPECT_EQ(died.error().status, 11);
  EXPECT_EQ(died.error().finding, FindingKind::subject_died);
}

}  // namespace
}  // namespace lockstep
