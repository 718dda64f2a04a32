// Catch2, whichever version the system has.
#pragma once

#if __has_include(<catch2/catch_test_macros.hpp>)
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
namespace rapt::testing {
using Approx = Catch::Approx;
}
#else
#include <catch2/catch.hpp>
namespace rapt::testing {
using Approx = Catch::Detail::Approx;
}
#endif
