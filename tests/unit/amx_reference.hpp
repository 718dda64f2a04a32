// The leaf of an ISA for tests: what RAPT_ISA=amx has in a build with the software model, beside the library's own.
#pragma once

#include "cpu/isa/amx.hpp"
