"""`rapt dossier`: a page for every entry, with nothing left out."""

import json
import os
import tempfile
import unittest
from pathlib import Path

from cli_test import RUN_KEYS, CliTest


class Dossier(CliTest):
    def test_every_entry_is_on_one_page_and_its_code_was_read(self):
        pages = self.run_json("dossier", "--no-check")["kernels"]
        listed = [entry["name"] for page in pages for entry in page["listed"]]
        self.assertEqual(sorted(listed), sorted(entry["name"] for entry in self.run_json("info")["entries"]))
        for page in pages:
            for field in ("computes", "sources", "sizes", "limits", "tests", "compiler"):
                self.assertTrue(page[field], f"{page['name']}: {field}")
            self.assertTrue(page["data"] or page["no_data"], page["name"])
            for entry in page["listed"]:
                code = [found for found in page["code"] if found["isa"] == entry["isa"]]
                self.assertEqual([found["source"] for found in code].count(page["sources"][0]), 1, entry["name"])
                for found in code:
                    self.assertTrue("-O" in found["flags"] or "-std" in found["flags"], found)
                    if page["backend"] == "cpu":
                        self.assertGreater(found["code_bytes"], 500, found)
                    else:
                        self.assertTrue(found.get("not_read") or found["gpu"], found)
        # The register tile of attention's products, which src/cpu/isa says the size of.
        if os.environ.get("RAPT_SANITIZE") or not pages[0]["compiler"].startswith("GNU"):
            return
        tiles = {found["isa"]: found["largest"] for page in pages if page["name"] == "attention_prefill" for found in page["code"]}
        for isa, (accumulators, registers) in {"generic": (8, 16), "avx2": (12, 16), "avx512": (24, 32)}.items():
            if isa in tiles:
                self.assertEqual(tiles[isa]["accumulators"], accumulators, (isa, tiles))
                self.assertLessEqual(tiles[isa]["registers"], registers)

    def test_markdown_and_json_say_the_same(self):
        with tempfile.TemporaryDirectory() as folder:
            text = self.run_ok("dossier", "--entry", "select_topk", "--json", f"{folder}/file.json")
            document = json.loads(Path(folder, "file.json").read_text())
        for key in RUN_KEYS:
            self.assertTrue(document["context"][key], key)
        (page,) = document["kernels"]
        self.assertIn(f"## {page['name']}\n\n{page['computes']}\n", text)
        for line in (*page["sizes"], *page["limits"]):
            self.assertIn(f"\n- {line}\n", text)
        for found in page["code"]:
            self.assertIn(f"| {found['code_bytes']} |", text)
        for entry in page["listed"]:
            self.assertIn(f"| `{entry['name']}` | f32 | - |", text)  # the operation has no head sizes
            if entry["usable"]:
                self.assertEqual((entry["errors"]["violation"], entry["errors"]["checked"] > 0), ("", True))
            else:
                self.assertIn(f"| `{entry['name']}` | not measured here |", text)

    def test_usage(self):
        self.assert_usage_error("dossier", "--entry", "no_such_entry", mentions="no_such_entry")
        self.assert_usage_error("dossier", "--json", "/no/such/folder/file.json", mentions="/no/such/folder")


if __name__ == "__main__":
    unittest.main()
