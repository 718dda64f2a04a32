"""Conan 2 recipe of rapt, from this checkout:

    conan create tools/packaging/conan -s compiler.cppstd=20 --build=missing
"""

import os
import re

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.build import check_min_cppstd, stdcpp_library
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load, rmdir
from conan.tools.scm import Version

required_conan_version = ">=2.0"

OLDEST = {"gcc": "12", "clang": "14"}
SOURCES = ("CMakeLists.txt", "LICENSE", "bench/*", "cmake/*", "include/*", "notices/*", "python/cuda/NOTICE", "src/*", "tests/*", "tools/*")


class RaptConan(ConanFile):
    name = "rapt"
    description = "Attention kernels for CPUs and GPUs"
    license = "Apache-2.0"
    topics = ("attention", "transformer", "inference", "simd", "cuda")
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False], "with_cuda": [True, False], "with_openmp": [True, False], "with_tools": [True, False]}
    default_options = {"shared": True, "with_cuda": False, "with_openmp": False, "with_tools": False}

    @property
    def _root(self):
        return os.path.join(self.recipe_folder, "..", "..", "..")

    def set_version(self):
        text = load(self, os.path.join(self._root, "CMakeLists.txt"))
        suffix = re.search(r'set\(rapt_version_suffix "(.*)"\)', text)[1]
        self.version = re.search(r"project\(rapt VERSION ([\d.]+)", text)[1] + suffix.replace(".dev", "-dev")

    def export_sources(self):
        for pattern in SOURCES:
            copy(self, pattern, self._root, self.export_sources_folder, excludes=("bench/results/*", "*/__pycache__/*"))

    def layout(self):
        cmake_layout(self)

    def requirements(self):
        self.requires("onetbb/[>=2021.8 <2023]")
        self.requires("xsimd/[>=8.1]", visible=False)  # compiled in; rapt's headers do not include it
        if self.options.with_tools:
            self.requires("cli11/[>=2.1 <3]", visible=False)
            self.requires("eigen/[>=3.4 <4]", visible=False)
            self.requires("fmt/[>=9]", visible=False)
            self.requires("nlohmann_json/[>=3.11 <4]", visible=False)

    def validate(self):
        check_min_cppstd(self, 20)
        compiler = str(self.settings.compiler)
        if self.settings.os != "Linux" or self.settings.arch not in ("x86_64", "armv8"):
            raise ConanInvalidConfiguration("rapt runs on Linux, on x86_64 and armv8")
        if compiler not in OLDEST or Version(self.settings.compiler.version) < OLDEST[compiler]:
            raise ConanInvalidConfiguration("rapt needs gcc 12 or clang 14, or newer")
        if self.options.with_cuda and not self.options.shared:
            raise ConanInvalidConfiguration("with_cuda needs shared=True: rapt looks for librapt_cuda next to librapt")

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        for name, value in {"BUILD_TESTS": False, "BUILD_TOOLS": self.options.with_tools, "CUDA": self.options.with_cuda,
                            "OPENMP": self.options.with_openmp, "ITT": False}.items():
            toolchain.cache_variables[f"RAPT_{name}"] = bool(value)
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        terms = [("LICENSE", ""), ("xsimd.txt", "notices")]
        if self.options.with_tools:
            terms += [(name + ".txt", "notices") for name in ("CLI11", "Eigen3", "fmt", "nlohmann_json")]
        if self.options.with_cuda:  # librapt_cuda contains the CUDA runtime
            terms.append(("NOTICE", "python/cuda"))
        for name, folder in terms:
            copy(self, name, os.path.join(self.source_folder, folder), os.path.join(self.package_folder, "licenses"))
        CMake(self).install()
        for folder in ("cmake", "pkgconfig"):  # Conan writes its own
            rmdir(self, os.path.join(self.package_folder, "lib", folder))

    def package_info(self):
        self.cpp_info.libs = ["rapt"]
        self.cpp_info.set_property("cmake_file_name", "rapt")
        self.cpp_info.set_property("cmake_target_name", "rapt::rapt")
        self.cpp_info.set_property("pkg_config_name", "rapt")
        if not self.options.shared:
            self.cpp_info.defines = ["RAPT_STATIC"]
            self.cpp_info.system_libs = ["dl", "m", "pthread", stdcpp_library(self)]
            if self.options.with_openmp:
                self.cpp_info.system_libs.append("gomp" if self.settings.compiler == "gcc" else "omp")
