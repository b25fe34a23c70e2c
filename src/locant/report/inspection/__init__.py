"""The page of `locant inspect`, one file per section. Each figure has a note on how to read it."""

from __future__ import annotations

from locant.analysis.inspection import Inspection
from locant.analysis.verdict import verdict
from locant.report.inspection.behaviour import behaviour_section
from locant.report.inspection.certainty import certainty_section
from locant.report.inspection.distance import distance_section
from locant.report.inspection.explanation import explanation_section
from locant.report.inspection.invariance import invariance_section
from locant.report.inspection.probes import probes_section
from locant.report.inspection.scheme import scheme_section
from locant.report.inspection.variance import variance_section
from locant.report.page import Report

SECTIONS = (
    explanation_section,
    invariance_section,
    distance_section,
    scheme_section,
    certainty_section,
    variance_section,
    probes_section,
    behaviour_section,
)


def inspection_page(found: Inspection) -> Report:
    """Returns the page on one model or table; sections without figures are left out."""
    sections = [section(found) for section in SECTIONS]
    return Report(
        found.name,
        found.question,
        tuple(verdict(found)),
        found.facts,
        tuple(section for section in sections if section.figures),
        tuple(found.notices),
    )
