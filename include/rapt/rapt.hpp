// The whole public C++ interface.
#pragma once

#include "rapt/context.hpp"
#include "rapt/cost.hpp"
#include "rapt/dropout.hpp"
#include "rapt/guards.hpp"
#include "rapt/kv_cache.hpp"
#include "rapt/kv_source.hpp"
#include "rapt/operations.hpp"
#include "rapt/plan.hpp"
#include "rapt/problem.hpp"
#include "rapt/roofline.hpp"
#include "rapt/score.hpp"
#include "rapt/task.hpp"
#include "rapt/tensor.hpp"
#include "rapt/types.hpp"
