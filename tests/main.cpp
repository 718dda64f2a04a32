// main() for Catch2 2, whose packages come without one.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
